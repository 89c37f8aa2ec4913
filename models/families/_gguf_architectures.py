"""The architectures of GGUF files: for each, the family that reads it, and what its files have that others do not.

A new one is an entry of `ARCHITECTURES`, if a family reads the same model from a folder. src/models/ and conversion/ of
llama.cpp say what its files hold, and llama_model_rope_type in src/llama-model.cpp whether rotary embedding pairs
neighbours (LLAMA_ROPE_TYPE_NORM), for which the converter reorders the rows of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...io.errors import DiffbitError
from ...io.fields import shown
from ._huggingface import FULL, SLIDING
from .lfm2 import CONV

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
EVERY_SIXTH, LAYERS_OF_27B = 6, 62
LAYERS_OF_2B4T, WIDTH_OF_2B4T = 30, 2560

# get(key after the architecture's name, default, type); the fields so far; {name: values} of the tensors of factors of
# rotary embedding
Fields = Callable[[Callable[..., Any], Mapping[str, Any], Mapping[str, np.ndarray]], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """What sets the files of an architecture apart.

    model_type: of the family that reads it. interleaved: whether rotary embedding pairs neighbours. names: {module:
    tensor}, where they are not `NAMES` (_gguf.py). one_plus: whether a norm is stored as 1 + w where a folder has w.
    fields: makes further fields of config.json. reads: the metadata keys and tensors that it reads, and that are
    refused elsewhere. neutral: {key: values} with which a key changes nothing in this architecture.
    """

    model_type: str
    interleaved: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    one_plus: bool = False
    fields: Fields = lambda get, values, factors: {}
    reads: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def rope_factor(get: Callable[..., Any]) -> Any:
    """Return the factor that divides all angles of rotary embedding."""
    factor = get("rope.scaling.factor")
    return (get("rope.scale_linear") if factor is None else factor) or 1


def _gemma3(get: Callable[..., Any], values: Mapping[str, Any], factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Only the model of 27 billion parameters scales its logits by another width than a head's; no key says so. Without
    a window all layers are alike."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    is_27b = values["num_hidden_layers"] == LAYERS_OF_27B and hidden and heads
    scalar = hidden // heads if is_27b else values["head_dim"]
    window = get("attention.sliding_window")
    pattern = get("attention.sliding_window_pattern", EVERY_SIXTH, int | tuple[bool | int, ...]) if window else 1
    kinds: dict[str, Any] = {"sliding_window_pattern": pattern}
    if isinstance(pattern, tuple):
        kinds = {"layer_types": [SLIDING if slides else FULL for slides in pattern]}
    local = get("rope.freq_base_swa", 10000.0)
    return {"query_pre_attn_scalar": scalar, "sliding_window": window, "rope_local_base_freq": local, **kinds}


def _granite(get: Callable[..., Any], values: Mapping[str, Any], factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """0 in three of the factors stands for none."""
    return {
        "attention_multiplier": get("attention.scale") or (values["head_dim"] or 1) ** -0.5,
        "embedding_multiplier": get("embedding_scale") or 1.0,
        "residual_multiplier": get("residual_scale") or 1.0,
        "logits_scaling": get("logit_scale", 1.0),
    }


def _lfm2(get: Callable[..., Any], values: Mapping[str, Any], factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A layer without keys is a convolution."""
    heads = get("attention.head_count_kv", values["num_attention_heads"], int | tuple[int, ...])
    kinds = {}
    if isinstance(heads, tuple):
        kinds = {"layer_types": [FULL if count else CONV for count in heads]}
        if len(counts := {count for count in heads if count}) != 1:
            raise DiffbitError(
                f"attention.head_count_kv is {shown(list(heads))}, wanted 0 for convolutions, and the same number for "
                "all other layers"
            )
        (heads,) = counts
    return {
        **kinds,
        "num_key_value_heads": heads,
        "norm_eps": values["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": get("shortconv.l_cache"),
    }


def _phi3(get: Callable[..., Any], values: Mapping[str, Any], factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """llama.cpp ignores the sliding window; transformers does not."""
    head_dim, context = values["head_dim"], values["max_position_embeddings"]
    fields: dict[str, Any] = {
        "sliding_window": get("attention.sliding_window") or None,
        "original_max_position_embeddings": get("rope.scaling.original_context_length", context),
    }
    if head_dim and (rotated := get("rope.dimension_count", head_dim)) != head_dim:
        fields["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # the family rounds down
    if factors:
        if factors.keys() != {LONG, SHORT}:
            raise DiffbitError(f"holds {' and '.join(sorted(factors))}, wanted {LONG} and {SHORT}")
        if (factor := rope_factor(get)) != 1 or get("rope.scaling.type", "", str) == "yarn":
            raise DiffbitError(f"scales RoPE by {factor} or yarn and by the tensor {SHORT}, wanted one of them")
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors[SHORT].tolist(),
            "long_factor": factors[LONG].tolist(),
            "attention_factor": get("rope.scaling.attn_factor", 1.0),
        }
    return fields


def _bitnet(get: Callable[..., Any], values: Mapping[str, Any], factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """No key says which activation a file of `bitnet` has. The models of its first authors have SiLU, which is all that
    llama.cpp computes; but BitNet b1.58 2B4T, which llama.cpp's converter writes as `bitnet`, too, squares a ReLU."""
    is_2b4t = (values["num_hidden_layers"], values["hidden_size"]) == (LAYERS_OF_2B4T, WIDTH_OF_2B4T)
    return {"hidden_act": "relu2" if is_2b4t else "silu"}


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),  # mistral's files, too
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma3": Architecture(
        "gemma3_text",
        one_plus=True,
        names={"post_attention_layernorm": "ffn_norm"},
        fields=_gemma3,
        reads=frozenset(("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")),
    ),
    "granite": Architecture(
        "granite",
        interleaved=True,
        fields=_granite,
        reads=frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale")),
        neutral={"rope.scaling.finetuned": (True,)},  # false switches rotary embedding off
    ),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", interleaved=True),  # every fourth layer is without positions
    "phi3": Architecture(
        "phi3",
        names={
            **{f"self_attn.{name}_proj": "attn_qkv" for name in "qkv"},
            **{f"mlp.{name}_proj": "ffn_up" for name in ("gate", "up")},
        },
        fields=_phi3,
        reads=frozenset(("attention.sliding_window", "rope.dimension_count", LONG, SHORT)),
    ),
    "lfm2": Architecture(
        "lfm2",
        names={"model.norm": "token_embd_norm"},
        fields=_lfm2,
        reads=frozenset(("attention.head_count_kv", "shortconv.l_cache")),
    ),
    "bitnet": Architecture("bitnet", fields=_bitnet),
    **dict.fromkeys(
        ("bitnet-b1.58", "bitnet-25"),  # of BitNet's fork of llama.cpp
        Architecture("bitnet", fields=lambda get, values, factors: {"hidden_act": "relu2"}),
    ),
}
