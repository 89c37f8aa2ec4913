"""Reads one safetensors file: checks its header before reading anything else, and reads tensors one at a time.

The format (github.com/huggingface/safetensors): 8 bytes little-endian length n, n bytes of UTF-8 JSON
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, then the data, offsets counted
from its start. Every byte of the data belongs to one tensor. Files that the format's own library refuses are refused
here, and so are duplicate keys, of which that library may take the last, and headers of millions of tensors.

Tensors are read into their own memory rather than mapped: mapped pages count as resident, so streaming a large file
through a map peaks at the file's size, and truncating a mapped file kills the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import DiffbitError
from .fields import Rule, bounds, get, located, one_of, read

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
    # of other tools' layouts, which their readers refuse by name
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),  # torch 2.6 has no such type
    "C64": torch.complex64,
}
LIMIT = 1 << 63  # of sizes and their products
HEADER_LIMIT = 16 << 20  # bytes; the library safetensors allows 100 MB. A header has about 100 bytes a tensor
MOST_TENSORS = 100_000  # of a file; a model with more of them has several files
COLONS = 4 * MOST_TENSORS + 100_000  # of a header: four a tensor, and some in the metadata

Size = Annotated[int, bounds(0, LIMIT - 1)]
Shape = Annotated[
    tuple[Size, ...],
    Rule("a list of sizes with a product below 2^63", lambda shape: all(n < LIMIT for n in accumulate(shape, mul))),
]
Name = Annotated[str, Rule("Unicode", lambda name: name == name.encode(errors="replace").decode())]


@dataclass(frozen=True)
class EntryOfHeader:
    """A tensor's entry, as it stands in the header."""

    dtype: Annotated[str, one_of(*DTYPES)]
    shape: Shape
    data_offsets: tuple[Size, Size]


Stamp = tuple[int, int, int]


def stamp(status: os.stat_result) -> Stamp:
    """Return what tells a file from another of its name, and from itself before it was written to."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Entry:
    """A tensor's dtype, shape and place in the file, from the header."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of the data, in bytes from the start of the file
    end: int
    stamp: Stamp  # of the file whose header this is

    def part(self, first: int, count: int) -> Entry:
        """Return an entry for `count` rows from row `first` on."""
        row_bytes = (self.end - self.begin) // max(1, self.shape[0])
        begin = self.begin + first * row_bytes
        return replace(self, shape=(count, *self.shape[1:]), begin=begin, end=begin + count * row_bytes)

    def read(self) -> Tensor:
        """Read the tensor, in its dtype and in the file's row order."""
        return self.stored_bytes().view(self.dtype).view(self.shape)

    def stored_bytes(self) -> Tensor:
        """Read the tensor's bytes as uint8 [end - begin]. Raises DiffbitError if the file is no longer the same."""
        data = torch.empty(self.end - self.begin, dtype=torch.uint8)
        try:
            with open(self.file, "rb") as stream:
                if stamp(os.fstat(stream.fileno())) != self.stamp:
                    raise DiffbitError(f"{self.file}: was changed while diffbit read it; run the command again")
                stream.seek(self.begin)
                if stream.readinto(data.numpy().data) < len(data):
                    raise DiffbitError(f"{self.file}: was cut short while being read; copy it again")
        except OSError as error:
            raise DiffbitError(f"{self.file}: cannot be read ({error.strerror})") from None
        return data

    def rows(self, start: int, stop: int) -> Tensor:
        """Read some of the tensor's rows."""
        return self.part(start, min(stop, self.shape[0]) - start).read()


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file; raises DiffbitError if the header does not fit the file."""
    try:
        with open(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            size = status.st_size
            length = int.from_bytes(stream.read(8), "little")
            if HEADER_LIMIT < length <= size - 8:
                raise DiffbitError(
                    f"{file}: its safetensors header has {length:,} bytes, more than the {HEADER_LIMIT:,} that are "
                    "read; split the model into several files"
                )
            if size < 8 or length > size - 8:
                raise DiffbitError(
                    f"{file}: is not a safetensors file, or is cut short ({size} bytes, but its header would end at "
                    f"byte {8 + length}); copy it again"
                )
            text = stream.read(length).decode()
        if text.count(":") > COLONS:  # counted before it is parsed, which would take seconds
            raise DiffbitError(
                f"{file}: its safetensors header lists more than {MOST_TENSORS:,} tensors, the most that are read of a "
                "file; split the model into several files"
            )
        header = json.loads(text, object_pairs_hook=partial(_unique, file), parse_constant=_no_number)
    except OSError as error:
        raise DiffbitError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise DiffbitError(f"{file}: its safetensors header is not valid JSON; copy the file again") from None
    if not isinstance(header, dict):
        raise DiffbitError(f"{file}: its safetensors header is not a JSON object; copy the file again")
    with located(file, "; copy the file again"):
        get(header, "__metadata__", Mapping[str, str], {})
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(file, name, value, start, status) for name, value in header.items()}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != start:
            raise DiffbitError(
                f"{file}: tensor {name} begins at byte {entry.begin}, but the one before it ends at byte {start}; "
                "copy the file again"
            )
        start = entry.end
    if start != size:
        raise DiffbitError(f"{file}: its last tensor ends at byte {start}, the file at byte {size}; copy it again")
    return entries


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the header; raises DiffbitError if it has a key twice."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise DiffbitError(f"{file}: its safetensors header has {key} twice; copy the file again")
        values[key] = value
    return values


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _entry(file: Path, name: str, value: object, start: int, status: os.stat_result) -> Entry:
    with located(f"{file}: tensor {name}", "; copy the file again"):
        read(Name, name, "its name")
        described: EntryOfHeader = read(EntryOfHeader, value, "", extra=True)
    kind, shape, (begin, end) = described.dtype, described.shape, described.data_offsets
    dtype = DTYPES[kind]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise DiffbitError(
            f"{file}: tensor {name} of shape {shape} and dtype {kind} needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"but its header gives it {end - begin}; copy the file again"
        )
    if start + end > status.st_size:
        raise DiffbitError(
            f"{file}: is cut short: tensor {name} ends at byte {start + end}, the file at byte {status.st_size}; "
            "copy it again"
        )
    return Entry(file, dtype, shape, start + begin, start + end, stamp(status))


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; raises OSError if that fails, as for any other file."""
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    umask = os.umask(0)  # safetensors makes files that only their owner can read; give it a new file's usual mode
    os.umask(umask)
    file.chmod(0o666 & ~umask)


Parts = tuple[tuple[int, ...], Iterable[Tensor]]  # the shape of a tensor, and its rows, some at a time


def write_parts(file: Path, tensors: Mapping[str, Parts]) -> None:
    """Write a safetensors file of fp32 tensors, given in parts, without holding a whole tensor in memory."""
    header, end = {}, 0
    for name, (shape, _) in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, parts in tensors.values():
            for part in parts:
                stream.write(part.contiguous().numpy().data)
