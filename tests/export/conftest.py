"""Checkpoints that the tests of this room share, made on first use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers import config_of, write_model, write_quantized

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """checkpoint_of("diff_v1", "int4_g32", num_heads=4): a random model's folder, quantized if a format is given."""
    folder = tmp_path_factory.mktemp("export")
    folders: dict[str, Path] = {}

    def make(attention: str, format: str | None = None, **changes: object) -> Path:
        name = "-".join([attention, *(f"{key}={value}" for key, value in changes.items())])
        if name not in folders:
            folders[name] = write_model(folder / f"m{len(folders)}", config_of(attention, **changes))
        if format is None:
            return folders[name]
        key = f"{name}-{format}"
        if key not in folders:
            folders[key] = write_quantized(folders[name], format)
        return folders[key]

    return make
