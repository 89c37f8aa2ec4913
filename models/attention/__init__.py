"""Attention variants: a file each, found by listing this folder. models/mixer.py says what a file has (AttentionOptions
and Attention are for these; mixers/ has those that are no attention).

Canonical order of rows: sub-heads in adjacent pairs (2i signal, 2i+1 noise); a 2d-wide value of diff_v1 as two
neighbouring sub-heads. Files on disk may have another order: families/.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..mixer import AttentionOptions


@cache
def names() -> tuple[str, ...]:
    """The files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def options(name: str) -> type[AttentionOptions]:
    """The options in the file of this name, one of `names()`."""
    found: type[AttentionOptions] = import_module(f".{name}", __name__).Options
    return found
