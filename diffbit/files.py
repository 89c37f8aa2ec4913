"""Files and folders that are complete or absent (written under a temporary name, then renamed); JSON, hashes, sizes.

It needs the standard library alone, so that the device runtime can use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import DiffbitError

MARKERS = ("config.json", "diffbit.json")  # only a folder with one of these is overwritten
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _temporary(path: Path) -> Path:
    short = path.name.encode()[:200].decode(errors="ignore")  # a name has at most 255 bytes
    return path.with_name(f".{short}.{os.getpid()}-{secrets.token_hex(3)}.tmp")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError (a full disk, a read-only folder) into a DiffbitError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be written ({error.strerror or error})") from None


def resolved(path: str | Path) -> Path:
    """The absolute path without links. Raises DiffbitError for links that lead in a circle."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise DiffbitError(f"{path}: cannot be resolved ({error}); choose another place") from None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; `Path.mkdir(parents=True)` fails where a thousand are missing."""
    for missing in [place for place in (*reversed(folder.parents), folder) if not place.is_dir()]:
        missing.mkdir(exist_ok=True)


@contextmanager
def write_atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to `path` on success and removed on failure.

    Raises DiffbitError where `path` is a folder or cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise DiffbitError(f"{path}: is a folder, wanted a file to write to; choose another name")
    temporary = _temporary(path)
    with _writing(path):
        make_folder(path.parent)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def check_place(path: str | Path, *, overwrite: bool = False) -> None:
    """Raise the errors of `new_folder` before any work is done."""
    path = Path(path)
    if path.is_file():
        raise DiffbitError(f"{path}: is a file, wanted a folder to write to; choose another name")
    if Path.cwd().is_relative_to(resolved(path)):
        raise DiffbitError(f"{path}: is or contains the working folder; choose another folder")
    with _writing(path):
        occupied = path.is_dir() and any(path.iterdir())
    if occupied and not overwrite:
        raise DiffbitError(f"{path}: already exists and is not empty; choose another folder or pass --overwrite")
    if occupied and not any((path / marker).is_file() for marker in MARKERS):
        raise DiffbitError(
            f"{path}: has neither {' nor '.join(MARKERS)}, so it is not a folder that diffbit wrote and is not "
            "overwritten; choose another folder"
        )


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and removed on failure.

    Raises DiffbitError for a non-empty `path` unless `overwrite` is set. Then the new folder replaces it when complete,
    and only if it has config.json or diffbit.json, so that a mistyped -o cannot delete a home directory. A link to a
    folder stays a link.
    """
    path = Path(path)
    check_place(path, overwrite=overwrite)
    with _writing(path):
        folder = resolved(path) if path.is_symlink() else path
        make_folder(folder.parent)
        temporary = _temporary(folder)
        temporary.mkdir()
        try:
            yield temporary
            if folder.is_dir():
                old = _temporary(folder)
                os.replace(folder, old)
                os.replace(temporary, folder)
                shutil.rmtree(old)
            else:
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_apart(output: str | Path, *sources: str | Path) -> None:
    """Raise DiffbitError if the output folder is or contains a source: overwriting it would delete the source."""
    for source in map(Path, sources):
        if source.exists() and resolved(source).is_relative_to(resolved(output)):
            raise DiffbitError(f"{output}: is or contains {source}, which this command reads; choose another folder")


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DiffbitError for a file that is missing, unreadable or not an object."""
    path = Path(path)
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        raise DiffbitError(f"{path}: no such file") from None
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The object in the JSON of a file. Raises DiffbitError where it is none."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise DiffbitError(f"{path}: is not valid JSON ({error}); restore the file") from None
    if not isinstance(value, dict):
        raise DiffbitError(f"{path}: contains a JSON {type(value).__name__}, wanted an object")
    return value


def write_json(path: str | Path, value: object) -> None:
    """Write `value` as indented JSON."""
    with write_atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal, without reading it into memory as a whole."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_size(text: str) -> int:
    """Bytes of a size such as "40MB" (40,000,000), "40MiB" (41,943,040), "1.2GB" or "800kB". Raises DiffbitError for
    other text."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise DiffbitError(f"{text!r} is not a size; wanted a number with its unit, such as 40MB, 40MiB or 1.2GB")
    return int(float(match[1]) * UNITS[match[2]])
