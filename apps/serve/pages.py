"""Rows of a cache in pages of the system: a row costs the memory that its tokens have written, gives it back, and
shares a prefix with other rows by reference.

PagedAttention (arXiv 2309.06180) has blocks of tokens, and a table of blocks that attention's kernel reads. Here the
page table of the processor is that table, so the kernel reads each row as one piece of memory: a prefix is a file in
memory, which each row that begins with it maps copy on write. Without Linux, prefixes are copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
MAPPINGS = 1 << 15  # Linux gives a process 65,530
FIXED = 0x10  # MAP_FIXED: in place of what is mapped there
Places = Mapping[str, tuple[slice, ...]]  # of tokens in each buffer, without the batch


class Prefix:
    """The first tokens of a row as a file in memory, which the system frees when no row maps it any more."""

    def __init__(self, size: int, tokens: int) -> None:
        self.tokens = tokens
        self.file = os.memfd_create("diffbit prefix")
        os.ftruncate(self.file, size)

    def __del__(self) -> None:
        os.close(self.file)


class Pages:
    """The memory of `arrays` [rows, ...], in which rows share pages. An array is copied if its rows are not whole
    pages."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays
        self._begins: dict[str, int] = {}  # where each array that can be mapped begins in the file of a prefix
        self._size = 0
        for name, array in arrays.items():
            row = array.nbytes // len(array)
            if sys.platform == "linux" and not row % PAGE and not array.ctypes.data % PAGE:
                self._begins[name] = self._size
                self._size += row

    def keep(self, row: int, tokens: int, places: Places) -> Prefix | None:
        """Move the first tokens of a row to a prefix; None if that saves nothing, or the system gives no file."""
        runs = {name: _runs(self._arrays[name][row][place]) for name, place in places.items() if name in self._begins}
        count = sum(len(offsets) for offsets, size in runs.values() if size >= PAGE)
        if not count or 2 * count * len(next(iter(self._arrays.values()))) > MAPPINGS:
            return None
        try:
            prefix = Prefix(self._size, tokens)
            for name, (offsets, size) in runs.items():
                memory = self._bytes(name, row)
                for offset in offsets:
                    os.pwrite(prefix.file, memory[offset : offset + size].data, self._begins[name] + offset)
        except OSError:  # no memory, or no file descriptors
            return None
        self.share(row, row, places, prefix)
        return prefix

    def share(self, row: int, source: int, places: Places, prefix: Prefix) -> None:
        """Give `row` tokens of `source` that `prefix` has: whole pages of them by reference, the others as copies."""
        for name, place in places.items():
            if name not in self._begins:
                self._arrays[name][row][place] = self._arrays[name][source][place]
                continue
            memory, origin = self._bytes(name, row), self._bytes(name, source)
            offsets, size = _runs(self._arrays[name][row][place])
            for offset in offsets:
                end = offset + size
                first = min(-(-offset // PAGE) * PAGE, end)
                last = max(end // PAGE * PAGE, first)
                if first < last:
                    _map(memory[first:last], prefix.file, self._begins[name] + first)
                memory[offset:first] = origin[offset:first]
                memory[last:end] = origin[last:end]

    def free(self, row: int) -> None:
        """Give a row's memory back. What is read there afterwards has no meaning."""
        for name in self._begins:
            _map(self._bytes(name, row))

    def _bytes(self, name: str, row: int) -> NDArray[np.uint8]:
        return self._arrays[name][row].reshape(-1).view(np.uint8)


def _runs(part: NDArray[Any]) -> tuple[Sequence[int], int]:
    """Return the pieces of memory that a part of a contiguous array consists of: their offsets in it, and the bytes of
    one."""
    size, outer = part.itemsize, part.ndim
    while outer and (part.strides[outer - 1] == size or part.shape[outer - 1] == 1):
        outer -= 1
        size *= part.shape[outer]
    offsets = np.zeros(1, np.int64)
    for count, stride in zip(part.shape[:outer], part.strides[:outer], strict=True):
        offsets = np.add.outer(offsets, np.arange(count) * stride).ravel()
    return offsets.tolist(), size


def _map(memory: NDArray[np.uint8], file: int = -1, offset: int = 0) -> None:
    """Let whole pages of memory be those of a file, each copied when it is written; without a file: new pages."""
    kind = mmap.MAP_PRIVATE | FIXED | (mmap.MAP_ANONYMOUS if file < 0 else 0)
    place = memory.ctypes.data
    system = _system()
    if system.mmap(place, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, kind, file, offset) != place:
        raise OSError(ctypes.get_errno(), "a page of the cache cannot be mapped")
    system.madvise(place, len(memory), mmap.MADV_NOHUGEPAGE)


@cache
def _system() -> ctypes.CDLL:
    system = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    system.mmap.restype = address
    system.mmap.argtypes = address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    system.madvise.argtypes = address, size, ctypes.c_int
    return system
