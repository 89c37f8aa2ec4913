"""A few seconds of the soak: nothing goes wrong, and a wrong answer would be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import soak


@pytest.mark.slow
def test_seconds_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CLIENTS", (4,))
    monkeypatch.setattr(soak, "REQUESTS", 20)
    assert soak.soak(0.08, tmp_path / "right", minute=3) == []
    said = soak._said
    broken = iter([True] * 20)  # the answers alone are others than those under load

    def differently(events: list[object], part: str) -> str:
        return said(events, part) + ("?" if next(broken, False) else "")

    monkeypatch.setattr(soak, "_said", differently)
    problems = soak.soak(0.05, tmp_path / "wrong", minute=3)
    assert problems and problems[-1].endswith("wrong answers")
