"""Memory that is free, as Linux counts it, and runs that would not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffbit.io import resources
from diffbit.io.errors import DiffbitError


def test_files_in_the_cache_are_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts what the system has read of files, and drops when it must."""
    numbers = {"max": "1000000", "current": "990000", "stat": "anon 90000\nactive_file 500000\ninactive_file 400000\n"}
    for name, text in numbers.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(resources, "GROUP", tmp_path)
    assert resources.available_memory() == 910_000


def test_each_process_takes_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_memory", lambda: 10**9)
    resources.require("a run", 10**9, 0, tmp_path)
    with pytest.raises(DiffbitError, match=r"a run, 2 times on this machine, takes about 2\.0 GB of memory, but 1"):
        resources.require("a run", 10**9, 0, tmp_path, processes=2)


def test_the_disk_is_that_of_the_output(tmp_path: Path) -> None:
    """Its folder, which need not exist yet."""
    resources.require("a run", 0, 1000, tmp_path / "a" / "b")
    with pytest.raises(DiffbitError, match=rf"writes about 1000000000\.0 GB to {tmp_path}, but .* are free there"):
        resources.require("a run", 0, 10**18, tmp_path / "a" / "b")
