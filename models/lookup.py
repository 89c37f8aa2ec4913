"""Looks up the options of a mixer or an MLP by the name of its file."""

from __future__ import annotations

from typing import Any

from ..io import plugins
from ..io.errors import DiffbitError


def options_class(what: str, name: str, *folders: str) -> Any:
    """Return the class `Options` in the file of this name, in one of these folders or added to it (io/plugins.py)."""
    for folder in folders:
        if name in plugins.names(folder):
            return plugins.load(folder, name).Options
    known = ", ".join(file for folder in folders for file in plugins.names(folder))
    raise DiffbitError(f"{what} is {name!r}, wanted one of {known}")
