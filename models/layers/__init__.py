"""Building blocks of layers, and the lookup of a mixer's or an MLP's options by listing their folders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated, Any

from ...io.errors import DiffbitError
from ...io.fields import get, one_of, read


@cache
def names(folder: ModuleType) -> tuple[str, ...]:
    """Return the names of the files of attention/, mixers/ or mlp/, which each have `Options`."""
    return tuple(sorted(module.name for module in iter_modules(folder.__path__)))


def options(what: str, name: str, *folders: ModuleType) -> Any:
    """Return the options class in the file of this name."""
    for folder in folders:
        if name in names(folder):
            return import_module(f"{folder.__name__}.{name}").Options
    known = ", ".join(file for folder in folders for file in names(folder))
    raise DiffbitError(f"{what} is {name!r}, wanted one of {known}")


def read_options(folders: tuple[ModuleType, ...], value: object, place: str) -> Any:
    """Read options from an object, whose `name` is that of a file in one of the folders."""
    values = dict(read(Mapping[str, Any], value, place))
    known = [file for folder in folders for file in names(folder)]
    name = get(values, "name", Annotated[str, one_of(*known)], place=place)
    del values["name"]
    return read(options("name", name, *folders), values, place)
