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
    made: dict[str, Path] = {}

    def make(attention: str, format: str | None = None, **changes: object) -> Path:
        name = "-".join([attention, *(f"{key}={value}" for key, value in changes.items())])
        if name not in made:
            made[name] = write_model(folder / f"m{len(made)}", config_of(attention, **changes))
        if format is None:
            return made[name]
        key = f"{name}-{format}"
        if key not in made:
            made[key] = write_quantized(made[name], format)
        return made[key]

    return make
