"""Headers that the format forbids: our reader's verdict beside the safetensors library's."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, deserialize

from diffbit.io import safetensors as safetensors_file
from diffbit.io.errors import DiffbitError
from diffbit.io.safetensors import read_header


def tensor(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
VALID: dict[str, tuple[Any, int]] = {  # the header (an object, JSON or bytes), bytes of data behind it
    "no tensors": ({}, 0),
    "any order of names": ({"a": tensor(4, 8), "b": tensor()}, 8),
    "a scalar": ({"a": tensor(shape=[])}, 4),
    "empty tensors": ({"a": tensor(0, 0, [0]), "b": tensor(), "c": tensor(4, 4, [3, 0])}, 4),
    "no name": ({"": tensor()}, 4),
    "another field": ({"a": tensor() | {"x": 1}}, 4),
    "spaces around": (f" {{{A}}}\n\t ", 4),
    "metadata": ({"__metadata__": {"format": "pt"}, "a": tensor()}, 4),
    "no metadata": ({"__metadata__": None}, 0),
}
FORBIDDEN: dict[str, tuple[Any, int]] = {
    "overlap": ({"a": tensor(), "b": tensor(2, 6)}, 6),
    "one inside another": ({"a": tensor(0, 8, [2]), "b": tensor(4, 4, [0])}, 8),
    "the same bytes": ({"a": tensor(), "b": tensor()}, 4),
    "a hole": ({"a": tensor(), "b": tensor(5, 9)}, 9),
    "a hole at the start": ({"a": tensor(4, 8)}, 8),
    "a byte behind": ({"a": tensor()}, 5),
    "data of no tensor": ({}, 1),
    "cut short": ({"a": tensor()}, 3),
    "offsets reversed": ({"a": tensor(4, 0)}, 4),
    "three offsets": ({"a": tensor() | {"data_offsets": [0, 4, 4]}}, 4),
    "too few bytes": ({"a": tensor(shape=[2])}, 4),
    "a shape that overflows": ({"a": tensor(0, 0, [1 << 62, 4])}, 0),
    "bytes that overflow": ({"a": tensor(0, 0, [1 << 62])}, 0),
    "an empty shape that overflows": ({"a": tensor(0, 0, [1 << 63, 4, 0])}, 0),
    "a size of 65 bits": ({"a": tensor(0, 0, [0, 1 << 64])}, 0),
    "a negative size": ({"a": tensor(shape=[-1])}, 4),
    "a fraction": ({"a": tensor(shape=[1.0])}, 4),
    "a truth value": ({"a": tensor(shape=[True])}, 4),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, 4),
    "an unknown dtype": ({"a": tensor(dtype="F33")}, 4),
    "dtype twice": ('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    "a tensor twice, other bytes": (f'{{{A},"a":{json.dumps(tensor(4, 8))}}}', 8),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0),
    "metadata in a list": ({"__metadata__": []}, 0),
    "metadata is a tensor": ({"__metadata__": tensor()}, 4),
    "NaN": (f'{{{A[:-1]},"x":NaN}}}}', 4),
    "a list": ("[]", 0),
    "nothing": ("", 0),
    "a NUL behind": ("{}\0", 0),
    "two objects": ("{}{}", 0),
    "UTF-16": ("{}".encode("utf-16-le"), 0),
    "a byte order mark": ("\ufeff{}", 0),
    "not UTF-8": (b'{"\xff":' + json.dumps(tensor()).encode() + b"}", 4),
    "half a character": ({"\ud800": tensor()}, 4),
    "a line break in a name": (f"{{{A.replace('a', chr(10), 1)}}}", 4),
}
STRICTER: dict[str, tuple[Any, int]] = {  # the library takes the last of two; others may take the first
    "a tensor twice": (f"{{{A},{A}}}", 4),
    "metadata's key twice": ('{"__metadata__":{"x":"1","x":"2"}}', 0),
}


def file_of(header: Any, data: int, length: int | None = None) -> bytes:
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + bytes(data)


def verdicts(data: bytes, file: Path) -> tuple[bool, bool]:
    """Is it valid for our reader, and for the library?"""
    file.write_bytes(data)
    ours = library = True
    try:
        read_header(file)
    except DiffbitError as error:
        assert str(error).startswith(f"{file}: ") and "\n" not in ascii(error)[1:-1]
        ours = False
    try:
        deserialize(data)
    except SafetensorError:
        library = False
    return ours, library


@pytest.mark.parametrize("case", [*VALID, *FORBIDDEN])
def test_verdicts(case: str, tmp_path: Path) -> None:
    valid = case in VALID
    data = file_of(*(VALID if valid else FORBIDDEN)[case])
    assert verdicts(data, tmp_path / "x") == (valid, valid)


@pytest.mark.parametrize("case", STRICTER)
def test_keys_that_are_there_twice(case: str, tmp_path: Path) -> None:
    assert verdicts(file_of(*STRICTER[case]), tmp_path / "x") == (False, True)
    with pytest.raises(DiffbitError, match=r"its safetensors header has . twice; copy the file again"):
        read_header(tmp_path / "x")


def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = (f'"{index}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for index in range(1_000_000))
    many = "{" + ",".join(entries) + "}"
    monkeypatch.setattr(json, "loads", None)
    for text in (many, many[: many.index(',"200000"')] + "}"):
        (tmp_path / "x").write_bytes(file_of(text, 0))
        with pytest.raises(DiffbitError, match=r"more than (the 16,777,216 that|100,000 tensors)"):
            read_header(tmp_path / "x")


def test_the_headers_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (0, 3, 1 << 63, (1 << 64) - 1):
        assert verdicts(file_of("{}", 0, length), tmp_path / "x") == (False, False)
    for data in (b"", bytes(7), bytes(8)):
        assert verdicts(data, tmp_path / "x") == (False, False)
    assert safetensors_file.HEADER_LIMIT <= 100_000_000  # that of the library
    monkeypatch.setattr(safetensors_file, "HEADER_LIMIT", 9)
    assert verdicts(file_of("{}" + " " * 7, 0), tmp_path / "x")[0]
    assert not verdicts(file_of("{}" + " " * 8, 0), tmp_path / "x")[0]
