"""Progress: every item once, lines where there is no terminal, silence when asked."""

from __future__ import annotations

import pytest

from diffbit.io import progress


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


def test_progress_prints_percents_and_counts_time_from_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_quiet", False)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    clock = iter((100.0, 103.0, 106.0, 112.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.Progress("quantizing", 1.0, begin=0.5) as bar:
        bar.to(0.5, "layers.2.mlp.up_proj")
        bar.to(0.75, "layers.3.mlp.up_proj")
        bar.to(0.875)
    assert capsys.readouterr().err.splitlines() == [
        "quantizing: layers.2.mlp.up_proj, 50%",
        "quantizing: layers.3.mlp.up_proj, 75%, about 6 s left",
        "quantizing: 88%, about 4 s left",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_quiet", False)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress.Progress("quantizing", 1.0) as bar:
        bar.to(0.25, "layers.3.mlp.up_proj")
    shown = capsys.readouterr().err
    assert "quantizing layers.3.mlp.up_proj" in shown and "25%" in shown
    assert list(progress.track([1, 2], "counting")) == [1, 2]
    assert "2/2" in capsys.readouterr().err
