"""One writer at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diffbit.cli.app import main
from diffbit.io.files import locked


def test_second_writer_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("diffbit.apps.allocate.command._text", None)  # where the work begins
    scheme, is_locked, may_end = tmp_path / "scheme.toml", threading.Event(), threading.Event()

    def write() -> None:
        with locked(scheme):
            is_locked.set()
            may_end.wait(60)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert is_locked.wait(60)
        with pytest.raises(SystemExit) as done:
            main(["allocate", "examples/pico/softmax", "--bits", "4", "-o", str(scheme)])
    finally:
        may_end.set()
        writer.join()
    assert done.value.code == 2 and "scheme.toml: another thread is writing there" in capsys.readouterr().err
    assert not scheme.exists()
