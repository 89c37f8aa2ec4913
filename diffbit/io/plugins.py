"""Finds the files that extend diffbit: those of one of its folders, and those that installed packages add to it.

A mixer, an MLP, a family, a number format, a method or a layout is one file of a folder, such as models/mlp/. A package
adds to that folder by an entry point in its pyproject.toml, in the group named after the folder:

    [project.entry-points."diffbit.mlp"]
    reglu = "their_package.reglu"            # one file, whose name in diffbit is reglu
    more = "their_package.mlps"              # a folder: each of its files

diffbit's own apps do the same. A package cannot take over the name of a file that is already there. Only packages that
the user has installed are imported, and nothing that a checkpoint names: a checkpoint records which packages its parts
are from (`package_of`), so that where one is missing a message can name it (`missing`).
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated

from .errors import DiffbitError
from .fields import Rule

PackageName = Annotated[str, Rule("the name of a package", re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch)]
PACKAGE = Path(__file__).parents[1]  # diffbit/. Its folders are listed without importing them, which would need torch


@cache
def names(folder: str) -> dict[str, str]:
    """Return {name: module} of the files of a folder, such as "diffbit.models.mlp", and of those that packages add.

    Files whose names begin with _ are helpers of the others. Raises DiffbitError if two have one name.
    """
    files = {name: f"{folder}.{name}" for name in _files(str(PACKAGE.joinpath(*folder.split(".")[1:])))}
    added: dict[str, str] = {}
    for entry in sorted(entry_points(group=f"diffbit.{folder.rpartition('.')[2]}"), key=lambda entry: entry.value):
        for name, module in _added(entry.name, entry.value).items():
            if (other := (files | added).get(name, module)) != module:
                raise DiffbitError(
                    f"an installed package adds {name} ({module}) to {folder}, where {other} has that name already; "
                    "uninstall one of them"
                )
            added[name] = module
    return dict(sorted((files | added).items()))


def load(folder: str, name: str) -> ModuleType:
    """Import the file of this name, which must be one of `names(folder)`."""
    return import_module(names(folder)[name])


def package_of(part: object) -> str | None:
    """Return the installed package that adds the file of an object's class; None: diffbit has it."""
    module = type(part).__module__
    owners = (package for value, package in _owners().items() if f"{module}.".startswith(f"{value}."))
    return next(owners, None)


@cache
def _owners() -> dict[str, str]:
    every = entry_points()
    entries = [entry for group in every.groups if group.startswith("diffbit.") for entry in every.select(group=group)]
    owners = {entry.value: entry.dist.name for entry in entries if entry.dist is not None}
    return {module: package for module, package in owners.items() if package != "diffbit"}


def missing(what: str, package: str) -> DiffbitError:
    """Return the error for a part, such as "mixer 'gated'", of a package that is not installed."""
    return DiffbitError(
        f"{what} is from the package {package}, which is not installed here; install it if you trust it: "
        f"pip install {package}"
    )


def _files(folder: str) -> list[str]:
    return [file.name for file in iter_modules([folder]) if not file.name.startswith("_")]


def _added(name: str, value: str) -> dict[str, str]:
    try:
        spec = find_spec(value)
    except ImportError:
        spec = None
    if spec is None:
        raise DiffbitError(f"an installed package adds {value} to diffbit, but has no such module; reinstall it")
    if spec.submodule_search_locations is None:
        return {name: value}
    return {file: f"{value}.{file}" for place in spec.submodule_search_locations for file in _files(place)}
