"""Checks of configuration values; each raises a DiffbitError that names the field."""

from __future__ import annotations

import math

from ..io.errors import DiffbitError

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
