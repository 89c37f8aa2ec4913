"""GGUF files (github.com/ggml-org/llama.cpp): converts their metadata to a config, their tensor names and row order.

The metadata become the fields of a config.json, which the family of that model_type reads or refuses; what a single
architecture has is in _gguf_architectures.py. If rotary embedding is interleaved, as in the official differential
modules, a head's rows of q_proj and k_proj are rows (0, d/2, 1, d/2 + 1, ...) of rotate-half's order. llama3's RoPE
scaling is stored as a tensor of factors, rope_freqs [d/2], from which its parameters are recovered.

Metadata that change what a model computes (`CHANGING`) are read as llama.cpp reads them (src/llama-model.cpp,
src/llama-context.cpp), or have a value that changes nothing (`NEUTRAL`), or the file is refused.

RoPE's scaling: its factor is `rope.scaling.factor` or else the older `rope.scale_linear`, 0 stands for 1, and its type
is "linear" unless the file says otherwise. yarn multiplies cos and sin by (1 + 0.1 ln factor) * attn_factor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from ...io.errors import DiffbitError
from ...io.fields import one_of, shown
from ...io.gguf import GGUF
from ..attention import AttentionOptions
from ..config import ModelConfig
from ..layers.rope import interleaved
from ..mixers import short_conv
from ._family import Family, Stored, parts
from ._gguf_architectures import ARCHITECTURES, LONG, SHORT, Architecture, rope_factor
from ._huggingface import attention_of, changed

ROPE_FREQS = "rope_freqs.weight"
FACTORS = {ROPE_FREQS, LONG, SHORT}  # tensors that are not the model's, but of its rotary embedding
CONVOLUTION = "shortconv.conv.weight"  # [C, K], in a folder [C, 1, K]
ARCHITECTURE = "general.architecture"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of every llama3
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mixer_output_norm": "post_attention_norm",
    "mlp_output_norm": "post_ffw_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "shortconv.conv1d": "shortconv.conv",
    "shortconv.o_proj": "shortconv.out_proj",
}
BIASES = {"qkv_bias": "attn_q", "o_bias": "attn_output"}  # {option of attention: tensor that has it}
ROTATED = "rope.dimension_count"
FIELDS = {  # {field of config.json: metadata key after the architecture's name}
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
# Keys after the architecture's name: those below these names change what a model computes
CHANGING = re.compile(
    r"(rope|attention|expert|pooling|altup|ssm|wkv|shortconv|swiglu_clamp)|.*(_scale|softcapping|causal|parallel_residual)$"
)
READ = frozenset((
    *FIELDS.values(), "attention.sliding_window", "attention.value_length", "rope.dimension_count", "pooling_type",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
))  # fmt: skip
HARMLESS = frozenset(("rope.scaling.finetuned",))
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values with which a key changes nothing; 0 does in all others
    "attention.causal": (True,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0, 1),
    "causal": (True,),
    "embedding_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1,),  # not set: 1 with yarn, 0 without
}
POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's numbers; 0: none


@dataclass(frozen=True)
class GGUFFamily(Family):
    """Reads the result of `fields` by `base`, the family of its model_type."""

    base: Family
    architecture: Architecture
    quantized = False

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """A file may have biases of queries, keys and values without one of the output, which no llama of transformers
        has."""
        config = self.base.read(values)
        biases = {"o_bias": values["o_bias"]} | ({"qkv_bias": True} if values["qkv_bias"] else {})
        layers = (
            changed(layer, **biases) if isinstance(layer.mixer, AttentionOptions) else layer for layer in config.layers
        )
        return replace(config, layers=tuple(layers))

    def stored(self, config: ModelConfig, name: str) -> Stored:
        place, (index, module, parameter) = self.base.stored(config, name), parts(name)
        if index is not None and isinstance(config.layers[int(index)].mixer, short_conv.Options):
            module = module.replace("self_attn.", "shortconv.")
        tensor = self.architecture.names.get(module) or NAMES.get(module, module)
        before = "" if index is None else f"blk.{index}."
        plus = 0.0 if self.architecture.one_plus else place.plus
        place = replace(place, names=(f"{before}{tensor}.{parameter}",), plus=plus)
        if not self.architecture.interleaved or module not in ("self_attn.q_proj", "self_attn.k_proj"):
            return place
        mixer = attention_of(config, name)
        heads = mixer.num_heads if "q_" in module else mixer.num_kv_heads
        return replace(place, rows=interleaved(heads, mixer.head_dim))


def fields(header: GGUF, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Convert the metadata to the fields of a config.json; factors: {name: values} of those of the tensors FACTORS that
    there are.

    Raises DiffbitError (without a file name) for an unknown architecture or an unsupported property.
    """
    if not header.get(ARCHITECTURE, str):
        raise DiffbitError(f"holds no {ARCHITECTURE}, wanted one of {', '.join(ARCHITECTURES)}")
    name = header.get(ARCHITECTURE, Annotated[str, one_of(*ARCHITECTURES)])
    architecture = ARCHITECTURES[name]

    def get(key: str, default: Any = None, kind: Any = int | float) -> Any:
        return header.get(f"{name}.{key}", kind, default)

    if experts := header.get(f"{name}.expert_count", int):
        raise DiffbitError(f"has {experts} experts per layer, wanted a model without experts")
    values = {field: get(key) for field, key in FIELDS.items() if key not in architecture.reads}
    values["rope_theta"] = 10000.0 if values["rope_theta"] is None else values["rope_theta"]
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    head_dim = values["head_dim"] = values["head_dim"] or _ratio(values["hidden_size"], values["num_attention_heads"])
    _check_keys(header, name, head_dim)
    windowed, rotates_in_part = (key in architecture.reads for key in ("attention.sliding_window", ROTATED))
    if (get("attention.sliding_window") or math.inf) < (values["max_position_embeddings"] or 0) and not windowed:
        raise DiffbitError(f"has a sliding window of {get('attention.sliding_window')} tokens, wanted none")
    if get("attention.value_length", head_dim) != head_dim:
        raise DiffbitError("has values of another width than keys, wanted the same")
    if get(ROTATED, head_dim) != head_dim and not rotates_in_part:
        raise DiffbitError(f"rotates {get(ROTATED)} of the {head_dim} channels of a head by RoPE, wanted all")
    if "token_embd.weight" not in header.tensors:
        raise DiffbitError("holds no tensor token_embd.weight")
    kinds = "bos", "eos", "eot", "eom", "padding"
    token = {kind: header.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in kinds}
    ends = list(dict.fromkeys(token[kind] for kind in ("eos", "eot", "eom") if token[kind] is not None))
    values |= {
        ARCHITECTURE: name,
        "model_type": architecture.model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{option: f"blk.0.{tensor}.bias" in header.tensors for option, tensor in BIASES.items()},
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "bos_token_id": token["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token["padding"],
    }
    if unread := factors.keys() - {ROPE_FREQS} - architecture.reads:
        raise DiffbitError(f"holds tensor {min(unread)}, which a model of architecture {name} does not have here")
    values |= architecture.fields(get, values, factors)
    if "rope_scaling" not in values:
        kind = get("rope.scaling.type", "linear", str)
        values["rope_scaling"] = _scaling(kind, get, values, factors.get(ROPE_FREQS))
    return values


def pooling(header: GGUF) -> str | None:
    """Return how a file's embeddings are made of its hidden states, as in ModelConfig; None: it does not say."""
    kind = header.get(f"{header.get(ARCHITECTURE, str)}.pooling_type", int, 0)
    return POOLINGS.get(kind, f"pooling_type {kind}") if kind else None


def _check_keys(header: GGUF, name: str, head_dim: int) -> None:
    """Raise DiffbitError for metadata that change what the model computes, and that are not read here."""
    architecture = ARCHITECTURES[name]
    for key, value in header.below(f"{name}.").items():
        known = key in architecture.reads or key in READ or (key in HARMLESS and key not in architecture.neutral)
        if known or not CHANGING.match(key):
            continue
        neutral = architecture.neutral.get(key) or NEUTRAL.get(key, (0,))
        if key == "attention.scale" and head_dim:
            neutral = (0, float(str(np.float32(head_dim**-0.5))), head_dim**-0.5)
        if key == "rope.scaling.yarn_ext_factor":
            neutral = (-1, float(header.get(f"{name}.rope.scaling.type", str) == "yarn"))
        if any(part not in neutral for part in (value if isinstance(value, list) else [value])):
            raise DiffbitError(
                f"{name}.{key} is {shown(value)}, which changes what the model computes; diffbit does not support it"
            )


def _ratio(total: Any, count: Any) -> int:
    return total // count if isinstance(total, int) and isinstance(count, int) and count > 0 else 0


def _scaling(
    kind: str, get: Callable[[str], Any], values: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    factor = rope_factor(get)
    attention = 1 if (stored := get("rope.scaling.attn_factor")) is None else stored
    if kind == "none":
        factor = 1
    if attention != 1 and kind != "yarn":
        raise DiffbitError(f"rope.scaling.attn_factor is {attention} with rope.scaling.type {kind}, wanted yarn")
    if factors is not None:
        if factor != 1 or kind == "yarn":
            raise DiffbitError(f"scales RoPE by {factor} ({kind}) and by the tensor {ROPE_FREQS}, wanted one of them")
        return _llama3(factors, values["rope_theta"] or 10000.0, values["head_dim"])
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    names = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    parameters = {field: get(f"rope.scaling.{key}") for field, key in names.items()}
    if attention != 1:
        parameters["attention_factor"] = attention * (1 + 0.1 * math.log(max(factor, 1)))
    given = {field: value for field, value in parameters.items() if value is not None}
    return {"rope_type": kind, "factor": factor} | given


def _llama3(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of llama3's scaling from its factors, which divide the frequencies."""
    factor = float(factors.max())
    low, high, original = LLAMA3.values()
    turns = original * abs(theta) ** -np.linspace(0, 1, factors.size, endpoint=False) / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clip(0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if factors.shape != (head_dim // 2,) or not np.allclose(factors, expected, rtol=1e-3):
        raise DiffbitError(f"{ROPE_FREQS} holds factors that are not those of llama3's rotary scaling")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
