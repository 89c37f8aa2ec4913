"""Writes schemes as files that `Scheme.from_file` reads."""

from __future__ import annotations

import json
from pathlib import Path

from ...io import files
from ...io.errors import DiffbitError
from ...quantize import Scheme


def write_scheme(scheme: Scheme, path: str | Path) -> None:
    """Write a .json or .toml file. Raises DiffbitError for another name."""
    path = Path(path)
    if path.suffix == ".json":
        files.write_json(path, scheme.to_dict())
    elif path.suffix == ".toml":
        with files.write_atomic(path) as temporary:
            temporary.write_text(_toml(scheme), encoding="utf-8")
    else:
        raise DiffbitError(f"{path}: wanted a .json or a .toml file to write a scheme to")


def _toml(scheme: Scheme) -> str:
    # a JSON string is a valid TOML basic string, except for DEL, which no module name contains
    values = scheme.to_dict()
    lines = [f"{name} = {json.dumps(values[name])}" for name in ("weights", "embedding", "head")]
    if scheme.activations is not None:
        lines.append(f"activations = {json.dumps(scheme.activations)}")
    attention = scheme.attention.to_dict()
    layers = attention.pop("layers", {})
    entries = [f"{name} = {json.dumps(value)}" for name, value in attention.items()]
    if layers:
        lines += ["", "[attention]", *entries, "", "[attention.layers]  # keys,values"]
        lines += [f"{layer} = {json.dumps(formats)}" for layer, formats in layers.items()]
    elif entries:
        lines.append(f"attention = {{ {', '.join(entries)} }}")
    overrides: dict[str, str] = values["overrides"]
    lines += ["", "[overrides]"] * bool(overrides)
    lines += [f"{json.dumps(glob)} = {json.dumps(format)}" for glob, format in overrides.items()]
    return "\n".join(lines) + "\n"
