"""Looks up the options of a mixer or an MLP by the name of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from ..io import plugins
from ..io.errors import DiffbitError
from ..io.fields import get, one_of, read, to_dict


def options_class(what: str, name: str, *folders: str) -> Any:
    """Return the class `Options` in the file of this name, in one of these folders or added to it (io/plugins.py)."""
    for folder in folders:
        if name in plugins.names(folder):
            return plugins.load(folder, name).Options
    known = ", ".join(file for folder in folders for file in plugins.names(folder))
    raise DiffbitError(f"{what} is {name!r}, wanted one of {known}")


def options_dict(options: Any) -> dict[str, Any]:
    """Return options as plain JSON, with the name of their file and the package that adds it, if one does."""
    package = plugins.package_of(options)
    return {"name": options.name} | ({} if package is None else {"package": package}) | to_dict(options)


def read_options(folders: tuple[str, ...], value: object, place: str) -> Any:
    """Read options from an object, whose `name` is that of a file in one of the folders or added to it."""
    values = dict(read(Mapping[str, Any], value, place))
    known = [file for folder in folders for file in plugins.names(folder)]
    package = get(values, "package", plugins.PackageName, None, place)
    if package is not None and get(values, "name", str, place=place) not in known:
        raise plugins.missing(f"{place} {values['name']!r}", package)
    name = get(values, "name", Annotated[str, one_of(*known)], place=place)
    values = {field: value for field, value in values.items() if field not in ("name", "package")}
    return read(options_class("name", name, *folders), values, place)
