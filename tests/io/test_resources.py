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


@pytest.mark.parametrize(
    ("groups", "files", "processors", "wanted"),
    [
        ("0::/", {}, 8, None),
        ("0::/", {"cpu.max": "max 100000"}, 8, None),
        ("0::/", {"cpu.max": "150000 100000"}, 8, 1),  # a second thread would wait for half of the time
        ("0::/docker/x", {"cpu.max": "300000 100000"}, 8, 3),  # as seen from outside of the container
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 8, 1),
        ("4:cpu,cpuacct:/\n0::/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 8, 2),
        ("4:cpu,cpuacct:/one", {"cpu/one/cpu.cfs_quota_us": "100000", "cpu/one/cpu.cfs_period_us": "100000"}, 8, 1),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, None),
        ("0::/", {}, 3, 3),  # affinity, and cpusets
        ("0::/", {"cpu.max": "400000 100000"}, 3, 3),
        ("nonsense", {}, 8, None),
    ],
)
def test_default_threads_are_those_that_the_system_allows(
    groups: str,
    files: dict[str, str],
    processors: int,
    wanted: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    for name, path in (("CONTROL_GROUPS", "cgroup"), ("GROUP", "groups"), ("PROCESSORS", "processors")):
        monkeypatch.setattr(resources, name, tmp_path / path)
    monkeypatch.setattr(resources.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    assert resources.default_threads() == wanted


def test_siblings_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(resources, "PROCESSORS", tmp_path)
    monkeypatch.setattr(resources, "CONTROL_GROUPS", tmp_path / "none")
    monkeypatch.setattr(resources.os, "cpu_count", lambda: 8)
    for allowed, wanted in (({0, 4}, 1), ({0, 1}, 2), (set(range(8)), None), ({0, 1, 2, 3}, None)):
        monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _, allowed=allowed: allowed, raising=False)
        assert resources.default_threads() == wanted
