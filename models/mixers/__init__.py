"""Mixers that are no attention, such as recurrences with a state of fixed size: a file each, found by listing this
folder. models/mixer.py says what a file has; docs/extending.md shows one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..mixer import MixerOptions


@cache
def names() -> tuple[str, ...]:
    """The files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def options(name: str) -> type[MixerOptions]:
    """The options in the file of this name, one of `names()`."""
    found: type[MixerOptions] = import_module(f".{name}", __name__).Options
    return found
