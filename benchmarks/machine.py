"""What this machine is, and how fast it can read: the denominator of the percentages in kernels.py."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

READ_BYTES = 256 << 20
LINE = 64


class Reader:
    """Reads a file of 256 MB, mapped as weights are, once a call, in equal parts on some threads."""

    def __init__(self, folder: Path) -> None:
        library = folder / "libmachine.so"
        source = Path(__file__).with_name("machine.c")
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        self._read = ctypes.CDLL(str(library)).read_all
        self._read.restype, self._read.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t]
        path = folder / "bandwidth.bin"
        path.write_bytes(np.random.default_rng(0).bytes(READ_BYTES))
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), READ_BYTES, flags=mmap.MAP_PRIVATE)
        self._data = np.frombuffer(mapped, np.uint8)

    def run(self, pool: ThreadPoolExecutor, threads: int) -> None:
        part = READ_BYTES // threads // LINE * LINE
        starts = [self._data.ctypes.data + i * part for i in range(threads)]
        list(pool.map(lambda start: self._read(start, part), starts))


def describe() -> str:
    """The processor in a few words."""
    name, cores = platform.machine(), os.cpu_count()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        if "model name" in fields:
            name = f"{fields['model name']} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
    caches = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / part).read_text().strip() for part in ("level", "type", "size"))
        if kind != "Instruction":
            caches.append(f"L{level}{'d' if kind == 'Data' else ''} {size}")
    return ", ".join([name, f"{cores} cores", *caches, f"{platform.system()} {platform.release().split('-')[0]}"])
