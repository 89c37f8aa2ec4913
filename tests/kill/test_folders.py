"""A folder that is overwritten by a run that is killed: the old or the new one has the name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diffbit.io import durable
from diffbit.io.files import locked

from ..io.test_files import NEW, OLD, read, write
from .points import killed_at

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork and renameat2")


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite_killed_at_any_step(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old or the new folder has the name; without an exchange of names the next run gives it back."""
    out, without, step = tmp_path / "out", 0, 0
    if exchange:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        assert durable.exchange(tmp_path / "a", tmp_path / "b"), "this file system can"
        (tmp_path / "a").rmdir()
        (tmp_path / "b").rmdir()
    else:
        monkeypatch.setattr(durable, "exchange", lambda one, other: False)
    write(out, OLD)
    seen = []
    while killed_at(step, lambda: write(out, NEW)):
        without += not out.exists()
        with locked(out):
            seen.append(read(out))
        assert [path.name for path in tmp_path.iterdir()] == ["out"], "what the killed run left is gone"
        write(out, OLD)
        step += 1
    assert read(out) == NEW and OLD in seen and NEW in seen and seen.index(NEW) == seen.count(OLD)
    assert without == (not exchange)
