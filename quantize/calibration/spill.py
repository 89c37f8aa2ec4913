"""Keeps hidden states of calibration tokens, and tensors that layers pass on, on disk for runs with little memory.

They are read and written, not mapped, because mapped pages count as resident memory. The file is unnamed, so a killed
run leaves nothing behind.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor


class DiskTensor:
    """A tensor fp32 [n, ...], such as [n, S, E], on disk. `rows[some]` reads and `rows[some] = tensor` writes some of
    the n entries; some: a slice, or indices int64. What is read lies on `device`."""

    def __init__(self, folder: Path, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this is)
        self._bytes = 4 * math.prod(shape[1:])

    def _places(self, rows: slice | Tensor) -> list[int]:
        indices = range(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows.tolist()
        return [index * self._bytes for index in indices]

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        places = self._places(rows)
        result = torch.empty(len(places), *self.shape[1:])
        for row, place in zip(result.numpy(), places, strict=True):
            buffer, done = memoryview(row).cast("B"), 0
            while done < self._bytes:
                self._file.seek(place + done)
                count = self._file.readinto(buffer[done:])
                if not count:
                    raise OSError("a temporary file was cut short")
                done += count
        return result.to(self.device)

    def __setitem__(self, rows: slice | Tensor, values: Tensor) -> None:
        for row, place in zip(values.cpu().contiguous().numpy(), self._places(rows), strict=True):
            buffer, done = memoryview(row).cast("B"), 0
            while done < self._bytes:
                self._file.seek(place + done)
                done += self._file.write(buffer[done:])
