"""Pictures of a run; what they look like is for eyes, that they are drawn whatever the numbers is for a test."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from diffbit.train.plot import plot_codes


@pytest.mark.parametrize("flips", [[0.0, 0.0, 0.0], [0.01, 0.002, 0.0]])
def test_codes_are_drawn_also_where_none_moves(flips: list[float], tmp_path: Path) -> None:
    log = [{"step": step, "flips": share, "zeros": 0.3} for step, share in enumerate(flips, 1)]
    plot_codes(log, tmp_path / "qat.png")
    data = (tmp_path / "qat.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">2I", data[16:24]) == (1080, 420)
    assert [path.name for path in tmp_path.iterdir()] == ["qat.png"]
