"""Files and folders under crashes, and two processes that write one name."""

from __future__ import annotations

import os
import posix
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffbit.io import durable
from diffbit.io.errors import DiffbitError
from diffbit.io.files import locked, new_folder, write_atomic

from ..forks import fork

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork, /proc and renameat2")
OLD, NEW = ({"config.json": text, "sub": text} for text in ("old", "new"))


def write(out: Path, content: dict[str, str]) -> None:
    with new_folder(out, overwrite=True) as folder:
        (folder / "config.json").write_text(content["config.json"])
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(content["sub"])


def read(out: Path) -> dict[str, str]:
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "sub"]
    return {"config.json": (out / "config.json").read_text(), "sub": (out / "sub" / "file").read_text()}


def test_what_is_renamed_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", OLD)
    done: list[str] = []

    def short(path: str | Path) -> str:
        return "/".join("TMP" if part.endswith(".tmp") else part for part in Path(path).relative_to(tmp_path).parts)

    def recorded(module: Any, name: str, words: Callable[..., str]) -> None:
        call = getattr(module, name)

        def record(*arguments: Any) -> Any:
            done.append(words(*arguments))
            return call(*arguments)

        monkeypatch.setattr(module, name, record)

    monkeypatch.setattr(os, "fsync", posix.fsync)
    recorded(os, "fsync", lambda descriptor: f"sync {short(os.readlink(f'/proc/self/fd/{descriptor}'))}")
    recorded(os, "replace", lambda *names: f"rename {' '.join(map(short, names))}")
    recorded(durable, "exchange", lambda *names: f"exchange {' '.join(map(short, names))}")
    write(tmp_path / "out", NEW)
    inside = {"sync TMP/config.json", "sync TMP/sub/file", "sync TMP/sub", "sync TMP"}
    assert set(done[:4]) == inside and done[3:] == ["sync TMP", "exchange TMP out", "sync "]
    done.clear()
    with write_atomic(tmp_path / "out" / "a.txt") as temporary:
        temporary.write_text("a")
    assert done == ["sync out/TMP", "rename out/TMP out/a.txt", "sync out"]


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    write(tmp_path / "out", OLD)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DiffbitError, match=r"out: cannot be written .Input/output error"):
        write(tmp_path / "out", NEW)
    monkeypatch.undo()

    replace, calls = os.replace, iter(range(9))
    monkeypatch.setattr(durable, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "replace", lambda *names: fails(0) if next(calls) == 1 else replace(*names))
    with pytest.raises(DiffbitError, match=r"out: cannot be written .Input/output error"):
        write(tmp_path / "out", NEW)
    assert read(tmp_path / "out") == OLD and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_processes(tmp_path: Path) -> None:
    """The second names the first; one that is killed holds up nobody."""
    out = tmp_path / "out"
    (tmp_path / "link").symlink_to(out)
    reader, writer = os.pipe()

    def wait() -> None:
        with new_folder(out) as folder:
            (folder / "half").touch()
            os.write(writer, b"1")
            signal.pause()

    child = fork(wait)
    os.read(reader, 1)
    try:
        for name in ("out", "link"):
            with pytest.raises(DiffbitError, match=f"{name}: process {child} is writing there"):
                write(tmp_path / name, NEW)
        assert len(list(tmp_path.glob(".out.*.tmp/half"))) == 1, "it is still at work"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / ".out.lock").read_text() == f"{child}\n"
    write(out, NEW)
    assert read(out) == NEW and sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_two_threads(tmp_path: Path) -> None:
    errors: list[str] = []

    def another() -> None:
        with pytest.raises(DiffbitError) as caught:
            write(tmp_path / "out", NEW)
        errors.append(str(caught.value))

    with locked(tmp_path / "out"):
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        write(tmp_path / "out", OLD)  # in the same thread it is taken again
    (error,) = errors
    assert error.startswith(f"{tmp_path / 'out'}: another thread is writing there; ")
    assert read(tmp_path / "out") == OLD and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_leftovers_of_this_name_are_removed(tmp_path: Path) -> None:
    gone = [".out.17-0a1b2c.tmp", ".out.18-0a1b2c.tmp", ".out.19-0a1b2c.old"]
    kept = [".out.tmp", ".out.17.tmp", ".out.x-0a1b2c.tmp", ".out2.17-0a1b2c.tmp", "out.17-0a1b2c.tmp"]
    (tmp_path / gone[0]).mkdir()
    (tmp_path / gone[0] / "model.safetensors").touch()
    for name in (*gone[1:], *kept):
        (tmp_path / name).touch()
    write(tmp_path / "elsewhere", OLD)
    (tmp_path / ".out.20-0a1b2c.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "out", "elsewhere"])
    assert read(tmp_path / "elsewhere") == OLD


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has none, or nothing can be written beside the output, what is asked for is done."""
    monkeypatch.setattr(durable, "fcntl", None)
    write(tmp_path / "out", NEW)
    monkeypatch.undo()
    (tmp_path / ".out.lock").mkdir()
    write(tmp_path / "out", OLD)
    assert read(tmp_path / "out") == OLD
    shutil.rmtree(tmp_path / ".out.lock")
    with locked("/"):
        pass
