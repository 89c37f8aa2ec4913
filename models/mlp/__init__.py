"""MLPs: a file each, found by listing this folder, with

    Options    a frozen dataclass, which config.json and manifests hold field by field; it has `module`
    an MLP     the module that `Options.module` makes

models/layers/mlp.py has the gated MLP that all of them are so far, with the norm before down_proj.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..layers.mlp import MLPOptions


@cache
def names() -> tuple[str, ...]:
    """The files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def options(name: str) -> type[MLPOptions]:
    """The options in the file of this name, one of `names()`."""
    found: type[MLPOptions] = import_module(f".{name}", __name__).Options
    return found
