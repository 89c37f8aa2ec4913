"""Memory and disk space of this machine, and refusals of runs that would not fit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .errors import DiffbitError
from .files import size_text

GROUP = Path("/sys/fs/cgroup")  # this process's control group
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


def require(what: str, memory: int, disk: int, output: str | Path, *, processes: int = 1, advice: str = "") -> None:
    """Raise DiffbitError if `memory` bytes for each of so many processes, or `disk` bytes near `output`, are not free.

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
