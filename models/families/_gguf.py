"""GGUF files (github.com/ggml-org/llama.cpp): converts their metadata to a config, their tensor names and row order.

The metadata become the fields of a config.json, which the family of that model_type reads or refuses. In llama's files
(and mistral's, which have the same architecture) rotary embedding is interleaved, as in the official differential
modules: a head's rows of q_proj and k_proj are rows (0, d/2, 1, d/2 + 1, ...) of rotate-half's order. llama3's RoPE
scaling is stored as a tensor of factors, rope_freqs [d/2], from which its parameters are recovered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ...io.errors import DiffbitError
from ...io.fields import one_of
from ...io.gguf import GGUF
from ..config import ModelConfig
from ..layers.rope import interleaved
from ._family import Family, Stored, parts
from ._huggingface import attention_of

ROPE_FREQS = "rope_freqs.weight"
ARCHITECTURE = "general.architecture"
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}  # whether its rotary embedding is interleaved
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
}
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


@dataclass(frozen=True)
class GGUFFamily(Family):
    """Reads the result of `fields` by `base`, the family of its model_type."""

    base: Family
    quantized = False

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        return self.base.read(values)

    def stored(self, config: ModelConfig, name: str) -> Stored:
        index, module, parameter = parts(name)
        before = "" if index is None else f"blk.{index}."
        tensor = f"{before}{NAMES.get(module, module)}.{parameter}"
        if not ARCHITECTURES[self.model_type] or module not in ("self_attn.q_proj", "self_attn.k_proj"):
            return Stored((tensor,))
        mixer = attention_of(config)
        return Stored((tensor,), interleaved(mixer.num_heads if "q_" in module else mixer.num_kv_heads, mixer.head_dim))


def fields(header: GGUF, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """Convert the metadata to the fields of a config.json; rope_factors [d/2]: the tensor ROPE_FREQS, if any.

    Raises DiffbitError (without a file name) for an unknown architecture or an unsupported property.
    """
    if not header.get(ARCHITECTURE, str):
        raise DiffbitError(f"holds no {ARCHITECTURE}, wanted one of {', '.join(ARCHITECTURES)}")
    architecture = header.get(ARCHITECTURE, Annotated[str, one_of(*ARCHITECTURES)])

    def get(key: str, default: Any = None) -> Any:
        return header.get(f"{architecture}.{key}", int | float, default)

    if experts := header.get(f"{architecture}.expert_count", int):
        raise DiffbitError(f"has {experts} experts per layer, wanted a model without experts")
    values = {field: get(key) for field, key in FIELDS.items()}
    head_dim = values["head_dim"] = values["head_dim"] or _ratio(values["hidden_size"], values["num_attention_heads"])
    if (get("attention.sliding_window") or math.inf) < (values["max_position_embeddings"] or 0):
        raise DiffbitError(f"has a sliding window of {get('attention.sliding_window')} tokens, wanted none")
    if get("attention.value_length", head_dim) != head_dim:
        raise DiffbitError("has values of another width than keys, wanted the same")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise DiffbitError(
            f"rotates {get('rope.dimension_count')} of the {head_dim} channels of a head by RoPE, wanted all"
        )
    if "token_embd.weight" not in header.tensors:
        raise DiffbitError("holds no tensor token_embd.weight")
    names = "bos", "eos", "eot", "eom", "padding"
    token = {name: header.get(f"tokenizer.ggml.{name}_token_id", int) for name in names}
    ends = list(dict.fromkeys(token[name] for name in ("eos", "eot", "eom") if token[name] is not None))
    return {
        **values,
        "model_type": architecture,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "bos_token_id": token["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token["padding"],
        "rope_scaling": _scaling(header.get(f"{architecture}.rope.scaling.type", str), get, values, rope_factors),
    }


def _ratio(whole: Any, count: Any) -> int:
    return whole // count if isinstance(whole, int) and isinstance(count, int) and count > 0 else 0


def _scaling(
    kind: str | None, get: Callable[[str], Any], values: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3(factors, values["rope_theta"] or 10000.0, values["head_dim"])
    if kind in (None, "none"):
        return None
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    parameters = {field: get(f"rope.scaling.{key}") for field, key in names.items()}
    return {"rope_type": kind} | {field: value for field, value in parameters.items() if value is not None}


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
