"""Reading one safetensors file: its header checked before anything is read, its tensors read one at a time.

The format (github.com/huggingface/safetensors): 8 bytes little-endian length n, n bytes of JSON
{name: {"dtype", "shape", "data_offsets": [begin, end]}}, then the data, offsets counted from its start.

Tensors are read into memory of their own rather than mapped: mapped pages count as resident, so streaming a large
file through a map peaks at the file's size, and a file that is cut short while mapped kills the process.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...errors import DiffbitError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library itself


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies and what it is, as the header says."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of the data, in bytes from the start of the file
    end: int

    def read(self) -> Tensor:
        """The tensor itself, in its dtype, in the order of the file."""
        return read_bytes(self.file, self.begin, self.end).view(self.dtype).view(self.shape)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; a DiffbitError where header and file do not fit together."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise DiffbitError(
                    f"{file}: is no safetensors file or is cut short ({size} bytes, its header would end at byte "
                    f"{8 + length}); copy it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise DiffbitError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise DiffbitError(f"{file}: its safetensors header is not valid JSON; copy the file again") from None
    if not isinstance(header, dict):
        raise DiffbitError(f"{file}: its safetensors header is no JSON object; copy the file again")
    header.pop("__metadata__", None)
    return {name: _entry(file, name, value, 8 + length, size) for name, value in header.items()}


def _entry(file: Path, name: str, value: object, start: int, size: int) -> Entry:
    try:
        assert isinstance(value, dict) and isinstance(value["dtype"], str)
        kind, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        assert all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (AssertionError, KeyError, TypeError, ValueError):
        raise DiffbitError(f"{file}: the header's entry of tensor {name} is malformed; copy the file again") from None
    if kind not in DTYPES:
        raise DiffbitError(f"{file}: tensor {name} has dtype {kind!r}, wanted one of {', '.join(DTYPES)}")
    dtype = DTYPES[kind]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise DiffbitError(
            f"{file}: tensor {name} of shape {shape} and dtype {kind} needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"but its header gives it {end - begin}; copy the file again"
        )
    if start + end > size:
        raise DiffbitError(
            f"{file}: is cut short: tensor {name} ends at byte {start + end}, the file at byte {size}; copy it again"
        )
    return Entry(file, dtype, shape, start + begin, start + end)


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; what keeps it from being written is an OSError, as for any other file."""
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    umask = os.umask(0)  # safetensors makes files that their owner alone can read; give it the mode of any new file
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def read_bytes(file: Path, begin: int, end: int) -> Tensor:
    """Bytes of a file, uint8 [end - begin]."""
    data = torch.empty(end - begin, dtype=torch.uint8)
    buffer, done = data.numpy().data, 0
    try:
        with open(file, "rb", buffering=0) as stream:
            stream.seek(begin)
            while done < len(buffer):
                count = stream.readinto(buffer[done:])
                if not count:
                    raise DiffbitError(f"{file}: was cut short while being read; copy it again")
                done += count
    except OSError as error:
        raise DiffbitError(f"{file}: cannot be read ({error.strerror})") from None
    return data
