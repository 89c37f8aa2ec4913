"""Quantization methods, which turn float weights into low-bit ones. Each is a file, found by listing this folder, that
makes METHOD, a `Method` (quantize/method.py). layer.py defines layers."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..method import Method


@cache
def methods() -> tuple[str, ...]:
    """Return the names of the methods: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def find(name: str) -> Method:
    """Import the method of this name."""
    method: Method = import_module(f".{name}", __name__).METHOD
    return method
