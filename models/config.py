"""The shape of a model: everything that decides its tensors and its arithmetic, and nothing else.

Counts are those of the mathematics, not of any file format: `num_heads` counts what the paper calls heads. A plain
Transformer head has one softmax, a differential head has two (a pair of query sub-heads), each `head_dim` wide:

    attention    q_proj rows    k_proj rows     v_proj rows     o_proj columns
    softmax      H * d          KV * d          KV * d          H * d
    diff_v1      2 * H * d      2 * KV * d      KV * 2d         H * 2d
    diff_v2      2 * H * d      KV * d          KV * d          H * d

What the same numbers are called in a config.json of Hugging Face's is the business of hf_config.py.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import DiffbitError

MLPS = ("swiglu", "relu2")
LIMITS = {  # far above any model, low enough that a damaged config.json cannot ask for the moon
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "intermediate_size": 1 << 22,
    "max_position": 1 << 31,
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (rope_type "llama3"): long wavelengths are slowed down by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _positive_number(name, getattr(self, name))
        _positive_integer("original_max_position", self.original_max_position, LIMITS["max_position"])
        if self.high_freq_factor <= self.low_freq_factor:
            raise DiffbitError(
                f"rope scaling: high_freq_factor is {self.high_freq_factor}, wanted more than low_freq_factor, "
                f"which is {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: pre-RMSNorm, RoPE, gated MLP, grouped-query attention of one of the variants in models/attention/."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # H: softmax heads, or pairs of a differential variant
    num_kv_heads: int  # KV: key-value heads; diff_v1: each holds two key sub-heads and one value 2d wide
    head_dim: int  # d: width of one softmax's query and key
    intermediate_size: int
    max_position: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5  # of the RMSNorms, and of diff_v1's head norm
    attention: str = "softmax"  # the name of a file in models/attention/
    mlp: str = "swiglu"  # or "relu2": the gate's function is silu(x) or relu(x)^2
    sub_norms: bool = False  # RMSNorms before o_proj and down_proj, as BitNet has them
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        from .attention import variants  # here: the variants' modules import this one

        for name, limit in LIMITS.items():
            _positive_integer(name, getattr(self, name), limit)
        for name in ("rope_theta", "norm_eps"):
            _positive_number(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise DiffbitError(
                f"num_heads is {self.num_heads}, wanted a multiple of num_kv_heads, which is {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise DiffbitError(f"head_dim is {self.head_dim}, wanted an even number: rotary embedding turns pairs")
        if self.attention not in variants():
            raise DiffbitError(f"attention is {self.attention!r}, wanted one of {', '.join(variants())}")
        if self.mlp not in MLPS:
            raise DiffbitError(f"mlp is {self.mlp!r}, wanted one of {', '.join(MLPS)}")
        if not isinstance(self.sub_norms, bool):
            raise DiffbitError(f"sub_norms is {self.sub_norms!r}, wanted true or false")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads it back to an equal config."""
        return asdict(self) | {"eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`; an unknown or missing field is a DiffbitError."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise DiffbitError(f"model config: unknown field {unknown[0]!r}; was it written by a newer version?")
        values = dict(values)
        try:
            if values.get("rope_scaling") is not None:
                values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
            values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
            return cls(**values)
        except TypeError as error:
            raise DiffbitError(f"model config: {error}") from None


def _positive_integer(name: str, value: object, limit: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise DiffbitError(f"{name} is {value!r}, wanted a whole number from 1 to {limit}")


def _positive_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise DiffbitError(f"{name} is {value!r}, wanted a positive number")
