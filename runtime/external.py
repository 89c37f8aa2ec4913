"""Reads and extends a model.onnx without the onnx package: finds the files that hold its external tensors, and turns
initializers into inputs.

ONNX stores large tensors in files beside the model, by name (`external_data`, key "location"). ONNX Runtime opens any
path it finds there; version 1.23 even opens "../x", absolute paths and links that lead out of the folder. So the names
are read here first, and each must be a file that the artifact lists.

Wire format of Protocol Buffers: a message is a sequence of fields. Each is a varint (field number << 3 | type) and a
value: a varint (type 0), 8 bytes (1), a varint length and as many bytes (2: text, bytes, a message), or 4 bytes (5).
Of two messages one after the other, a reader makes one, in which the second's fields follow the first's.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..io.errors import DiffbitError
from .artifact import MANIFEST, MODEL, Artifact

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
INT64 = 7  # onnx.TensorProto.INT64
MOST_DEPTH = 64  # of nested messages: a graph in a node in a graph

# onnx.proto: for each message that leads to a tensor, {field number: message}
KEY = b"location"
TENSOR = "tensor"
FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: TENSOR, 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: TENSOR, 6: "graph", 10: TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: TENSOR, 2: TENSOR},
    TENSOR: {13: "entry"},
}


def check_external(artifact: Artifact) -> None:
    """Raise a DiffbitError unless all tensors of the model lie in its listed files."""
    model = artifact.file(artifact.graph)
    folder = artifact.graph.removesuffix(MODEL)
    for location in sorted(external_locations(model)):
        if folder + location not in artifact.files:
            raise DiffbitError(
                f"{model}: takes tensors from {location!r}, which {MANIFEST} does not list; export the model again"
            )
        artifact.file(folder + location)


def external_locations(path: Path) -> set[str]:
    """Return the locations of an ONNX file's external tensors. Raises DiffbitError if it is not an ONNX model."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return set(_locations(data, 0, len(data), "model", 0))
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise DiffbitError(f"{path}: is not an ONNX model that can be read ({error}); export the model again") from None


def with_inputs(model: bytes, names: Iterable[str]) -> bytes:
    """Return the model with the initializers `names` (int64, of one dimension) as inputs, too; their values become
    defaults.

    A model with such inputs in its file would do the same; but then ONNX Runtime prints a warning about each of them,
    wherever the file is opened.
    """
    for name in names:
        dimension = _field(1, _field(2, name.encode()))  # a size that is called like the input
        int64 = bytes([1 << 3 | VARINT, INT64])
        tensor_type = _field(1, int64 + _field(2, dimension))
        model += _field(7, _field(11, _field(1, name.encode()) + _field(2, tensor_type)))  # graph.input
    return model


def _field(number: int, value: bytes) -> bytes:
    """Return a field with at most 127 bytes."""
    assert len(value) < 128
    return bytes([number << 3 | BYTES, len(value)]) + value


def _locations(data: mmap.mmap, position: int, end: int, message: str, depth: int) -> Iterator[str]:
    if depth > MOST_DEPTH:
        raise ValueError(f"messages more than {MOST_DEPTH} deep")
    inner = FIELDS[message]
    for number, begin, stop in _fields(data, position, end):
        name = inner.get(number)
        if name == "entry":
            yield from _entry(data, begin, stop)
        elif name is not None and data.find(KEY, begin, stop) >= 0:  # most nodes and tensors do not contain it
            yield from _locations(data, begin, stop, name, depth + 1)


def _entry(data: mmap.mmap, position: int, end: int) -> Iterator[str]:
    """Yield the value of a StringStringEntryProto with the key "location"; every value, if the field is repeated."""
    keys: list[bytes] = []
    values: list[bytes] = []
    for number, begin, stop in _fields(data, position, end):
        if number in (1, 2):
            (keys if number == 1 else values).append(data[begin:stop])
    if KEY in keys:
        for value in values:
            yield value.decode("utf-8")


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, begin, end) of each length-delimited field; numeric fields are skipped."""
    while position < end:
        tag, position = _varint(data, position, end)
        kind = tag & 7
        if kind == VARINT:
            _, position = _varint(data, position, end)
            continue
        size = 8 if kind == EIGHT else 4
        if kind == BYTES:
            size, position = _varint(data, position, end)
        elif kind not in (EIGHT, FOUR):
            raise ValueError(f"a field of type {kind} at byte {position}")
        if size > end - position:
            raise ValueError(f"a field of {size} bytes at byte {position} that ends at byte {end}")
        if kind == BYTES:
            yield tag >> 3, position, position + size
        position += size


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    if position < end and data[position] < 128:  # nearly always
        return data[position], position + 1
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise ValueError(f"a number at byte {position} without an end")
