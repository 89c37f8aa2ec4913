"""Quantization methods, which turn float weights into low-bit ones.

Each is a file of this folder, or one that a package adds to it (io/plugins.py), and makes METHOD, a `Method`
(quantize/method.py). layer.py defines layers.
"""

from __future__ import annotations

from ...io import plugins
from ..method import Method


def methods() -> tuple[str, ...]:
    """Return the names of the methods: the names of their files."""
    return tuple(plugins.names(__name__))


def find(name: str) -> Method:
    """Import the method of this name."""
    method: Method = plugins.load(__name__, name).METHOD
    return method
