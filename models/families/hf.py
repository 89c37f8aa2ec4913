"""ModelConfig <-> config.json as Hugging Face's transformers writes and reads it (4.49 and later, and 5).

Versions differ in where rotary embedding is described: up to 4 as `rope_theta` and `rope_scaling` at the top, from 5
on in one dictionary `rope_parameters`. Both are read; `rope_theta` + `rope_scaling` are written, which both accept.
What diffbit cannot compute (biases, other activations, other rotary types) is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import DiffbitError
from ..attention import model_type, model_types, variant
from ..config import ModelConfig, RopeScaling

DTYPES = ("float32", "bfloat16", "float16")
ACTS = {"silu": "swiglu", "relu2": "relu2"}  # hidden_act: ModelConfig.mlp
CLASSES = {  # those that transformers has
    "llama": "LlamaForCausalLM",
    "diffllama": "DiffLlamaForCausalLM",
    "bitnet": "BitNetForCausalLM",
}


def from_hf(values: dict[str, Any]) -> ModelConfig:
    """The config in a parsed config.json; a DiffbitError (that names no file) where diffbit cannot read it."""
    kind = values.get("model_type")
    known = model_types()
    if not isinstance(kind, str) or kind not in known:
        raise DiffbitError(f"model_type is {kind!r}, wanted one of {', '.join(sorted(known))}")
    attention, sub_norms = known[kind]
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise DiffbitError(f"{name} is {values[name]!r}, wanted false: diffbit's linear layers have no bias")
    act = values.get("hidden_act") or ("relu2" if kind == "bitnet" else "silu")
    if act not in ACTS:
        raise DiffbitError(f"hidden_act is {act!r}, wanted one of {', '.join(ACTS)}")
    query_heads = _count(values, "num_attention_heads")
    kv_heads = _count(values, "num_key_value_heads", default=query_heads)
    hidden_size = _count(values, "hidden_size")
    if values.get("head_dim") is None and hidden_size % query_heads:
        raise DiffbitError(
            f"hidden_size is {hidden_size} and not divisible by num_attention_heads, which is {query_heads}; where "
            "that is meant, head_dim must be given"
        )
    heads, kv_heads = variant(attention).Attention.heads_from_hf(query_heads, kv_heads)
    max_position = _count(values, "max_position_embeddings", default=2048)
    theta, scaling = _rope(values, max_position, 500000.0 if kind == "bitnet" else 10000.0)
    return ModelConfig(
        vocab_size=_count(values, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_count(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_count(values, "head_dim", default=hidden_size // query_heads),
        intermediate_size=_count(values, "intermediate_size"),
        max_position=max_position,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(values, "rms_norm_eps", default=1e-6 if kind == "llama" else 1e-5),
        attention=attention,
        mlp=ACTS[act],
        sub_norms=sub_norms,
        tie_embeddings=_flag(values, "tie_word_embeddings"),
        bos_token_id=_token(values, "bos_token_id"),
        eos_token_ids=_tokens(values, "eos_token_id"),
        pad_token_id=_token(values, "pad_token_id"),
    )


def with_tokens(config: ModelConfig, generation: dict[str, Any]) -> ModelConfig:
    """The config with the tokens of a parsed generation_config.json: where given, they are what transformers heeds."""
    bos, pad = _token(generation, "bos_token_id"), _token(generation, "pad_token_id")
    return replace(
        config,
        bos_token_id=config.bos_token_id if bos is None else bos,
        eos_token_ids=_tokens(generation, "eos_token_id") or config.eos_token_ids,
        pad_token_id=config.pad_token_id if pad is None else pad,
    )


def to_hf(config: ModelConfig, dtype: str, quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a checkpoint whose float tensors are `dtype` ("float32", "bfloat16" or "float16")."""
    kind = model_type(config.attention, config.sub_norms)
    query_heads, kv_heads = variant(config.attention).Attention.hf_heads(config)
    eos = config.eos_token_ids
    scaling = config.rope_scaling
    values: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": next(act for act, mlp in ACTS.items() if mlp == config.mlp),
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        },
        "attention_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
    }
    if kind in CLASSES:
        values = {"architectures": [CLASSES[kind]]} | values
    if quantization is not None:
        values["quantization_config"] = quantization
    return values


def _rope(values: dict[str, Any], max_position: int, default: float) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    rope: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # where both stand, rope_scaling wins, as in transformers
        entry = values.get(name)
        if entry is not None and not isinstance(entry, dict):
            raise DiffbitError(f"{name} is {entry!r}, wanted an object or null")
        rope = entry or rope
    theta = _number(rope if rope.get("rope_theta") is not None else values, "rope_theta", default=default)
    for source in (values, rope):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise DiffbitError(
                f"partial_rotary_factor is {source['partial_rotary_factor']!r}, wanted 1: diffbit turns whole heads"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise DiffbitError(f"the rotary embedding is of type {kind!r}, wanted 'default' or 'llama3'")
    return theta, RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position=_count(rope, "original_max_position_embeddings", default=max_position),
    )


def _present(values: dict[str, Any], name: str, default: Any) -> Any:
    value = values.get(name)
    if value is not None:
        return value
    if default is None:
        raise DiffbitError(f"the field {name} is missing")
    return default


def _count(values: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _present(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DiffbitError(f"{name} is {value!r}, wanted a positive whole number")
    return value


def _number(values: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _present(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DiffbitError(f"{name} is {value!r}, wanted a positive number")
    return float(value)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise DiffbitError(f"{name} is {value!r}, wanted true or false")
    return value


def _token(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DiffbitError(f"{name} is {value!r}, wanted a token id or null")
    return value


def _tokens(values: dict[str, Any], name: str) -> tuple[int, ...]:
    value = values.get(name)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise DiffbitError(f"{name} is {value!r}, wanted a token id, a list of token ids or null")
    return tuple(items)
