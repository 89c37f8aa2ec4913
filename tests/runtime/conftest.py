from __future__ import annotations

from pathlib import Path

import pytest

from .toy import random_toy


@pytest.fixture(params=[False, True], ids=["growing", "in_place"])
def in_place(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def artifact(tmp_path: Path, in_place: bool) -> Path:
    """The random toy model in one of the two cache modes."""
    return random_toy().write(tmp_path / "artifact", in_place=in_place)
