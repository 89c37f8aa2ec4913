"""What this machine can do at most, measured: the denominators of the percentages in kernels.py."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import HERE, compiled

READ_BYTES = 256 << 20
RATES = {
    "avx512vnni": ("int8 avx512vnni", "fp32 avx512"),
    "avxvnni": ("int8 avxvnni", "fp32 avx2"),
    "avx2": ("int8 avx2", "fp32 avx2"),
}


class Reader:
    """What a kernel that only waits for memory would do, in turn with the others (see peers.py)."""

    settle = 0.0

    def __init__(self, run: Callable[[], float]) -> None:
        self.run = run

    def close(self) -> None:
        pass


class Machine:
    """Compiles machine.c, and holds a file of 256 MB, mapped as weights are, to read from."""

    def __init__(self, folder: Path) -> None:
        library = compiled(folder, "machine", [HERE / "machine.c"])
        self._read = library.read_seconds
        self._read.restype = ctypes.c_double
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.POINTER(ctypes.c_uint64)]
        self._rate = library.operations_per_second
        self._rate.restype, self._rate.argtypes = ctypes.c_double, [ctypes.c_char_p, ctypes.c_int]
        path = folder / "bandwidth.bin"
        path.write_bytes(np.random.default_rng(0).bytes(READ_BYTES))
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), READ_BYTES, flags=mmap.MAP_PRIVATE)
        self._data = np.frombuffer(mapped, np.uint8)
        self._read(self._data.ctypes.data, READ_BYTES, 1, 1, 0, ctypes.c_uint64())  # the pages come in

    def bandwidth(self, threads: int, rounds: int = 9) -> dict[str, Any]:
        """The best GB/s over numbers of streams and prefetch distances, each the median of interleaved rounds."""
        ways = [(streams, ahead) for streams in (1, 2, 4, 8) for ahead in (0, 1024, 2048)]
        found: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                seconds = self._read(self._data.ctypes.data, READ_BYTES, threads, *way, ctypes.c_uint64())
                found[way].append(READ_BYTES / seconds / 1e9)
        medians = {way: statistics.median(rates) for way, rates in found.items()}
        best = max(medians, key=lambda way: medians[way])
        return {
            "op": "read",
            "threads": threads,
            "gb_per_s": round(medians[best], 1),
            "streams": best[0],
            "prefetch_bytes": best[1],
            "one_stream_gb_per_s": round(medians[1, 0], 1),
        }

    def reader(self, row: dict[str, Any]) -> Reader:
        """A contender that reads the file the way that a row of `bandwidth` found best."""
        arguments = (READ_BYTES, row["threads"], row["streams"], row["prefetch_bytes"])
        return Reader(lambda: self._read(self._data.ctypes.data, *arguments, ctypes.c_uint64()))

    def rates(self, isa: str, threads: int) -> dict[str, Any]:
        """Giga-operations a second of an instruction set's byte dot product and float multiply-add; {} if unknown."""
        if isa not in RATES:
            return {}
        int8, fp32 = (max(self._rate(name.encode(), threads) for _ in range(5)) / 1e9 for name in RATES[isa])
        return {"op": "peak", "isa": isa, "threads": threads, "int8_gops": round(int8), "fp32_gflops": round(fp32)}


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
