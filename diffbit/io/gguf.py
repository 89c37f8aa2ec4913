"""Reads and checks the header of a GGUF file: its metadata and the position of each tensor.

The format (github.com/ggml-org/ggml, docs/gguf.md), with little-endian numbers: "GGUF", version u32, tensor count u64,
metadata count u64; the metadata (key, value type u32, value); the tensors (name, number of dimensions u32, dimensions
u64 with the fastest first, type u32, offset u64); padding to `general.alignment`; the data, at which offsets begin. A
string is its length u64 and UTF-8; an array is its type u32, its length u64 and its values.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np

from .errors import DiffbitError
from .fields import FieldError, bounds, located, read, shown
from .model_files import PART, part_named

SUFFIX, MAGIC = ".gguf", b"GGUF"
MOST_PARTS = 10_000
VERSIONS = (2, 3)
NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "bool", 10: "u8", 11: "i8", 12: "f8"}
FLOAT32, STRING, ARRAY = 6, 8, 9
KINDS = {int: "iu", float: "iuf"}  # of numpy's types, those that `GGUF.array` takes for a type of Python
WORDS = {str: "texts", int: "whole numbers", float: "finite numbers"}
MOST_DIMENSIONS = 4
LARGE = 1 << 24  # bytes of a file whose header is kept
# Limits of a header, several times what any model has. A file with holes in it is as long as it likes at no cost
MOST_TENSORS, MOST_PAIRS = 1 << 17, 1 << 13
MOST_ENTRIES = 1 << 21  # of arrays, in all: each token of a vocabulary has a text, a score and a type
HEADER_BYTES = 1 << 28
ALIGNMENT = Annotated[int, bounds(1, 1 << 20)]


@dataclass(frozen=True)
class TensorInfo:
    type: int  # ggml's type number
    shape: tuple[int, ...]  # rows first, as in torch
    begin: int  # in bytes from the start of the file


@dataclass(frozen=True)
class GGUF:
    file: Path
    status: os.stat_result  # of the file when its header was read
    tensors: Mapping[str, TensorInfo]
    _metadata: Mapping[str, Any]  # numbers, strings, numpy arrays of numbers, lists of strings: see `get` and `array`

    def parts(self) -> list[GGUF]:
        """Return the headers of all files that llama-gguf-split made of a model, NAME-00001-of-00003.gguf first, whose
        metadata is the model's; of a whole file, its own. Raises DiffbitError if one is missing or of another model."""
        with located(self.file):
            count = self.get("split.count", Annotated[int, bounds(0, MOST_PARTS)], 1)
        if count <= 1:
            return [self]
        name = PART.fullmatch(self.file.name)
        if name is None or int(name[3]) != count:
            raise DiffbitError(
                f"{self.file}: is one of {count} parts of a model, wanted a name such as "
                f"model-00001-of-{count:05}.gguf; give all parts their names again"
            )
        files = [self.file.with_name(part_named(self.file.name, f"{number:05}")) for number in range(1, count + 1)]
        if missing := [file.name for file in files if not file.is_file()]:
            raise DiffbitError(f"{self.file}: is one of {count} parts of a model, and {missing[0]} is missing")
        headers = [read_gguf(file) for file in files]
        for number, header in enumerate(headers):
            with located(header.file):
                found = header.get("split.no", int, -1), header.get("split.count", int, 1)
            if found != (number, count):
                raise DiffbitError(
                    f"{header.file}: says that it is part {found[0] + 1} of {found[1]}, wanted {number + 1} of {count}"
                )
        return headers

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """Return metadata as a type (fields.py). Raises DiffbitError, without the file's name, if it is of another."""
        value = self._metadata.get(key)
        return default if value is None else read(kind, _plain(value), key)

    def below(self, prefix: str) -> dict[str, Any]:
        """Return the metadata whose keys begin with `prefix`, by the rest of the key."""
        return {
            key.removeprefix(prefix): _plain(value) for key, value in self._metadata.items() if key.startswith(prefix)
        }

    def array(self, key: str, kind: type[str] | type[int] | type[float]) -> list[Any]:
        """Return an array as a list of str, int or (finite) float; empty if absent. Raises DiffbitError as `get` does.

        An array's values have one type, so that one look is enough for hundreds of thousands of tokens.
        """
        value = self._metadata.get(key, [])
        numbers = isinstance(value, np.ndarray) and value.dtype.kind in KINDS.get(kind, "")
        if not (numbers and np.isfinite(value).all()) and not (isinstance(value, list) and (kind is str or not value)):
            raise FieldError(key, f"{key} is {shown(_plain(value))}, wanted a list of {WORDS[kind]}")
        return list(_plain(value))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def find_gguf(path: Path) -> Path | None:
    """`path` itself if it is named *.gguf or begins as such a file does (ollama's have no ending), or the only file of
    that name in a folder without safetensors; otherwise None. Of a model in several parts, return the first."""
    if not path.is_dir() and (path.suffix.lower() == SUFFIX or _begins_as_gguf(path)):
        return _first_part(path)
    if not path.is_dir() or any(path.glob("*.safetensors")) or (path / "diffbit.json").exists():
        return None
    files = sorted({_first_part(file) for file in path.iterdir() if file.suffix.lower() == SUFFIX})
    if len(files) > 1:
        raise DiffbitError(f"{path}: holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    return files[0] if files else None


def _first_part(file: Path) -> Path:
    first = file.with_name(part_named(file.name, "00001"))
    return first if first.is_file() else file


def _begins_as_gguf(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a pipe would wait
            return False
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(file: Path) -> GGUF:
    """Read the header of a file. Raises DiffbitError if it is not a GGUF file, is damaged or cut short.

    Headers of large files, whose vocabularies take half a second to read, are kept while the file stays as it is.
    """
    try:
        state = os.stat(file)
        if state.st_size >= LARGE:
            return _kept(file, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        return _read(file)
    except FileNotFoundError:
        raise DiffbitError(f"{file}: no such file") from None
    except OSError as error:
        raise DiffbitError(f"{file}: cannot be read ({error.strerror})") from None


def _read(file: Path) -> GGUF:
    with open(file, "rb") as stream:
        return _Reader(file, stream).header()


@lru_cache(maxsize=2)
def _kept(file: Path, *state: int) -> GGUF:
    """Return the header of a file in this state."""
    return _read(file)


class _Reader:
    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        self.file, self.stream = file, stream
        self.status = os.fstat(stream.fileno())
        self.size = self.status.st_size
        self.entries = 0  # of the arrays so far

    def header(self) -> GGUF:
        if (magic := self.stream.read(4)) != MAGIC:
            raise DiffbitError(f"{self.file}: is not a GGUF file: it begins with {magic!r}, wanted b'GGUF'")
        version = self.number("I")
        if version not in VERSIONS:
            raise DiffbitError(f"{self.file}: has GGUF version {version}, wanted 2 or 3 (little-endian)")
        tensors, pairs = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self.limited(self.fitting(pairs, 13), MOST_PAIRS, "metadata")):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"holds the metadata {key!r} twice")
            metadata[key] = self.value(self.number("I"))
        header = GGUF(self.file, self.status, {}, metadata)
        with located(self.file):
            alignment = header.get("general.alignment", ALIGNMENT, 32)
        relative: dict[str, TensorInfo] = {}
        for _ in range(self.limited(self.fitting(tensors, 32), MOST_TENSORS, "tensors")):
            name = self.string()
            if name in relative:
                raise self.damaged(f"holds the tensor {name!r} twice")
            relative[name] = self.tensor(name)
        for name, tensor in relative.items():
            if tensor.begin % alignment:
                raise self.damaged(
                    f"says that tensor {name!r} begins at {tensor.begin}, wanted a multiple of {alignment}"
                )
        start = -(-self.stream.tell() // alignment) * alignment
        tensors_at = {name: TensorInfo(t.type, t.shape, start + t.begin) for name, t in relative.items()}
        return replace(header, tensors=tensors_at)

    def tensor(self, name: str) -> TensorInfo:
        dimensions = self.number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self.damaged(f"says that tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self.read(8 * dimensions))))
        if not all(shape) or math.prod(shape) > 1 << 50:
            raise self.damaged(f"says that tensor {name!r} has the shape {shape}")
        return TensorInfo(self.number("I"), shape, self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            self.entries += self.fitting(count, 1)
            self.limited(self.entries, MOST_ENTRIES, "entries of arrays")
            if kind == STRING:
                return [self.string() for _ in range(self.fitting(count, 8))]
            dtype = self.dtype(kind)
            return np.frombuffer(self.read(self.fitting(count, dtype.itemsize) * dtype.itemsize), dtype)
        number = np.frombuffer(self.read(self.dtype(kind).itemsize), self.dtype(kind))[0]
        return float(str(number)) if kind == FLOAT32 else number.item()  # 1e-5, not 9.999999747378752e-06

    def dtype(self, kind: int) -> np.dtype[Any]:
        if kind not in NUMBERS:  # or an array of arrays, which no model has
            raise self.damaged(f"holds metadata of the unknown type {kind}")
        return np.dtype(NUMBERS[kind]).newbyteorder("<")

    def string(self) -> str:
        try:
            return self.read(self.fitting(self.number("Q"), 1)).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("holds a string that is not UTF-8") from None

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.read(struct.calcsize(code)))[0])

    def read(self, count: int) -> bytes:
        if self.stream.tell() + count > HEADER_BYTES:
            raise self.damaged(f"has a header of more than {HEADER_BYTES:,} bytes, the most that are read")
        data = self.stream.read(self.fitting(count, 1))
        if len(data) != count:
            raise self.damaged("is cut short")
        return data

    def limited(self, count: int, limit: int, what: str) -> int:
        """Return `count` if it is at most `limit`, else raise."""
        if count > limit:
            raise self.damaged(f"announces {count:,} {what}, more than the {limit:,} that are read")
        return count

    def fitting(self, count: int, size: int) -> int:
        """Return `count` if the rest of the file can hold that many entries of at least `size` bytes, else raise."""
        if count * size > self.size - self.stream.tell():
            raise self.damaged(f"is cut short or damaged: at byte {self.stream.tell()} it announces {count} entries")
        return count

    def damaged(self, what: str) -> DiffbitError:
        return DiffbitError(f"{self.file}: {what}; copy the file again")
