"""Memory, processors and disk space of this machine, and refusals of runs that would not fit."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from .errors import DiffbitError
from .files import size_text

GROUP = Path("/sys/fs/cgroup")  # this process's control group
CONTROL_GROUPS, PROCESSORS = Path("/proc/self/cgroup"), Path("/sys/devices/system/cpu")
SAFE = 0.85  # share of an estimate that must be free for a run to start


def available_memory() -> int | None:
    """Return the bytes that this process can still allocate, from Linux's counts for the machine and for the control
    group; None on other systems."""
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) << 10)
        used = int((GROUP / "memory.current").read_text())
        for line in (GROUP / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("active_file", "inactive_file"):  # page cache, which the system can drop
                used -= int(value)
        limits.append(int((GROUP / "memory.max").read_text()) - used)
    except (OSError, ValueError):  # another system, or no limit ("max")
        pass
    return min(limits, default=None)


def resident_memory() -> int:
    """Return the resident bytes of this process; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def give_back() -> None:
    """Return memory that was freed to the system, which glibc keeps for the next allocation."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def default_threads() -> int | None:
    """Return how many threads a computation of this process gets if nothing else is asked for, where the system limits
    it to less than the machine has: to some processors (affinity, cpusets), or to a share of their time (the quotas of
    control groups, version 1 and 2); None: nothing limits it.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    least = min([_cores(allowed), *(max(1, math.floor(share)) for share in _quotas())])
    return least if least < _cores(set(range(os.cpu_count() or 1))) else None


def _cores(processors: Collection[int]) -> int:
    """Number of physical cores that these logical processors belong to."""
    siblings = set()
    for number in processors:
        try:
            siblings.add((PROCESSORS / f"cpu{number}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(number))
    return len(siblings)


def _quotas() -> Iterator[float]:
    """Yield the processors' worth of time that each control group of this process may have."""
    try:
        lines = CONTROL_GROUPS.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, files = GROUP, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, files = GROUP / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):  # of a container the root alone may be there: its path is that outside
            if not folder.is_relative_to(root):
                break
            try:
                quota, period = " ".join((folder / file).read_text().strip() for file in files).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError):
                continue


def require(what: str, memory: int, disk: int, output: str | Path, *, processes: int = 1, advice: str = "") -> None:
    """Raise DiffbitError if `memory` bytes for each process, or `disk` bytes near `output`, are not free.

    what: what takes them, such as "exporting FOLDER". advice: what may help besides more memory.
    """
    free = available_memory()
    if free is not None and SAFE * memory * processes > free:
        times = f", {processes} times on this machine," if processes > 1 else ""
        raise DiffbitError(
            f"{what}{times} takes about {size_text(processes * memory)} of memory, but {size_text(free)} are free; "
            f"use a machine with more memory{advice}"
        )
    folder = Path(output).absolute()
    while not os.path.isdir(folder):  # unlike Path.is_dir(), it accepts names of any length
        folder = folder.parent
    space = shutil.disk_usage(folder).free
    if SAFE * disk > space:
        raise DiffbitError(
            f"{what} writes about {size_text(disk)} to {folder}, but {size_text(space)} are free there; choose another "
            "disk for the output"
        )
