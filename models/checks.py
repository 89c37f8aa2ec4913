"""Checks of configuration values; each raises a DiffbitError that names the field."""

from __future__ import annotations

import math

from ..errors import DiffbitError

LIMITS = {  # far above any real model, but low enough to catch a damaged config.json
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "intermediate_size": 1 << 22,
}  # of others: 2^31


def check_count(name: str, value: object) -> None:
    """Check for a whole number from 1 to the limit in LIMITS."""
    limit = LIMITS.get(name, 1 << 31)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise DiffbitError(f"{name} is {value!r}, wanted a whole number from 1 to {limit}")


def check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise DiffbitError(f"{name} is {value!r}, wanted a positive number")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise DiffbitError(f"{name} is {value!r}, wanted true or false")


def check_heads(num_heads: object, num_kv_heads: object, head_dim: object) -> None:
    """Check the sizes of grouped-query attention with rotary embedding."""
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        check_count(name, value)
    assert isinstance(num_heads, int) and isinstance(num_kv_heads, int) and isinstance(head_dim, int)
    if num_heads % num_kv_heads:
        raise DiffbitError(f"num_heads is {num_heads}, wanted a multiple of num_kv_heads, which is {num_kv_heads}")
    if head_dim % 2:
        raise DiffbitError(f"head_dim is {head_dim}, wanted an even number: rotary embedding rotates pairs")
