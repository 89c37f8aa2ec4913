"""Progress: every item once, lines where there is no terminal, silence when asked."""

from __future__ import annotations

import pytest

from diffbit import progress


def test_a_log_gets_lines_and_quiet_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_quiet", False)  # a command run with --quiet before leaves it set
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    assert list(progress.track([1, 2, 3, 4], "counting")) == [1, 2, 3, 4]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"counting: {n} of 4" for n in (1, 2, 3, 4)]
    assert lines[-1].endswith("about 0 s left")
    assert list(progress.track(iter("ab"), "counting")) == ["a", "b"]
    assert capsys.readouterr().err == "counting: 1\ncounting: 2\n"
    progress.set_quiet(True)
    try:
        assert list(progress.track(range(3), "counting")) == [0, 1, 2]
    finally:
        progress.set_quiet(False)
    assert capsys.readouterr() == ("", "")


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(range(1000), "counting")) == list(range(1000))
    assert capsys.readouterr() == ("", "")
