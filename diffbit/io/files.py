"""Files and folders that are complete or absent (written under a temporary name, then renamed); JSON, hashes, sizes.

Data is on disk before the file gets its name. Only one process at a time writes to a name (`locked`). The next one
removes anything that a killed process left there.

Needs only the standard library, because the device runtime uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import durable
from .errors import DiffbitError

MARKERS = ("config.json", "diffbit.json", "site.json")  # only a folder with one of these is overwritten
MOST_JSON = 1 << 28  # bytes of a JSON file
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Busy(DiffbitError):
    """Another process or thread is writing there."""


_held: dict[Path, int] = {}  # {path locked by this process: its thread}


def _beside(path: Path, ending: str) -> Path:
    short = path.name.encode()[:200].decode(errors="ignore")  # a name has at most 255 bytes
    return path.with_name(f".{short}.{ending}")


def _temporary(path: Path, ending: str = "tmp") -> Path:
    return _beside(path, f"{os.getpid()}-{secrets.token_hex(3)}.{ending}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError (a full disk, a read-only folder) into a DiffbitError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be written ({error.strerror or error})") from None


def resolved(path: str | Path) -> Path:
    """Return the absolute path without links. Raises DiffbitError for circular links."""
    try:
        real = Path(path).resolve()
        if any(map(os.path.islink, (real, *real.parents))):  # Python 3.13 says nothing about it
            raise RuntimeError("a link leads to itself")
        return real
    except (OSError, RuntimeError) as error:
        raise DiffbitError(f"{path}: cannot be resolved ({error}); choose another place") from None


def folder_name(path: str | Path) -> str:
    """Return the name of a model's file or folder; in the Hugging Face cache (models--ORG--NAME/snapshots/COMMIT),
    NAME."""
    path = Path(path)  # a file of that cache is a link to one with a hash as its name
    place = resolved(path.parent) / path.name if path.is_file() else resolved(path)
    return place.parent.parent.name.rpartition("--")[2] if place.parent.name == "snapshots" else place.name


def check_within(folder: Path, file: Path) -> None:
    """Raise DiffbitError unless a file, after following links, is in the folder or in blobs/ of its Hub cache."""
    home, real = resolved(folder), resolved(file)
    caches = (at.parent.parent for at in (home, *home.parents) if at.parent.name == "snapshots")
    if not real.is_relative_to(home) and real.parent not in (cache / "blobs" for cache in caches):
        raise DiffbitError(f"{file}: is a link that leads out of the folder; put the file itself there")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; `Path.mkdir(parents=True)` fails if a thousand are missing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(folder)  # raises for a name that is too long, before anything is made; is_dir of Python 3.14 does not
    for missing in [place for place in (*reversed(folder.parents), folder) if not place.is_dir()]:
        missing.mkdir(exist_ok=True)


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Keep other processes and threads from writing to `path`, a file or folder, and remove leftovers of killed runs.

    The lock is the file `.NAME.lock` beside it. Some network file systems have no locks, so names there are not
    protected. A thread may lock a path twice. Raises Busy if another thread or process holds the lock.
    """
    path = Path(path)
    place = resolved(path)
    if place in _held or not place.name:  # the root has no folder for a lock
        if _held.get(place, threading.get_ident()) != threading.get_ident():
            raise Busy(f"{path}: another thread is writing there; wait until it ends, or choose another name")
        yield
        return
    with _writing(path):
        make_folder(place.parent)
    file = _beside(place, "lock")
    try:
        descriptor = durable.lock(file)
    except BlockingIOError:
        who = ""
        with suppress(OSError):  # the other may just have ended
            who = file.read_text().strip()
        raise Busy(
            f"{path}: {f'process {who}' if who else 'another process'} is writing there; wait until it ends, or choose "
            "another name"
        ) from None
    _held[place] = threading.get_ident()
    try:
        if descriptor is not None:
            sweep(place)
        yield
    finally:
        del _held[place]
        if descriptor is not None:
            durable.unlock(file, descriptor)


def sweep(path: Path) -> None:
    """Remove what killed runs left beside `path`, which this process has locked. Restores a folder that a killed run
    had moved aside to replace it."""
    left = re.compile(re.escape(_beside(path, "").name) + r"\d+-[0-9a-f]{6}\.(tmp|old)")
    with suppress(OSError):
        for entry in path.parent.iterdir():
            if not (match := left.fullmatch(entry.name)):
                continue
            if match[1] == "old" and not path.exists():
                os.replace(entry, path)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder atomically if it exists; if the run is killed meanwhile, `sweep` removes the rest."""
    if path.is_dir():
        aside = _temporary(path)
        os.replace(path, aside)
        durable.sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def write_atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to `path` on success and removed on failure.

    Raises DiffbitError if `path` is a folder, cannot be written, or another process is writing it.
    """
    path = Path(path)
    if path.is_dir():
        raise DiffbitError(f"{path}: is a folder, wanted a file to write to; choose another name")
    with _writing(path), locked(path):
        temporary = _temporary(path)
        try:
            yield temporary
            durable.sync(temporary)
            os.replace(temporary, path)
            durable.sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def check_place(path: str | Path, *, overwrite: bool = False) -> None:
    """Raise the errors that `new_folder` would raise, before any work is done."""
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
            f"{path}: has neither {' nor '.join(MARKERS)}, so diffbit did not write it and does not "
            "overwrite it; choose another folder"
        )


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and removed on failure.

    Raises DiffbitError for a non-empty `path` unless `overwrite` is set. With it, the complete new folder replaces the
    old one, but only if the old one has config.json or diffbit.json, so a mistyped -o cannot delete a home directory.
    At every moment either the old or the new folder has the name; if the system cannot exchange names, the next run
    restores the old folder after a crash. A link to a folder stays a link.
    """
    path = Path(path)
    check_place(path, overwrite=overwrite)
    with _writing(path), locked(path):
        check_place(path, overwrite=overwrite)  # again: another process may have written it since
        folder = resolved(path) if path.is_symlink() else path
        temporary = _temporary(folder)
        temporary.mkdir()
        try:
            yield temporary
            durable.sync_tree(temporary)
            if not folder.is_dir():
                os.replace(temporary, folder)
            elif not durable.exchange(temporary, folder):
                old = _temporary(folder, "old")
                os.replace(folder, old)  # if the run is killed here, `sweep` restores it
                try:
                    os.replace(temporary, folder)
                finally:
                    if folder.exists():
                        shutil.rmtree(old)
                    else:
                        os.replace(old, folder)
            durable.sync(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_apart(output: str | Path, *sources: str | Path) -> None:
    """Raise DiffbitError if the output folder is or contains a source: overwriting it would delete the source."""
    for source in map(Path, sources):
        if source.exists() and resolved(source).is_relative_to(resolved(output)):
            raise DiffbitError(f"{output}: is or contains {source}, which this command reads; choose another folder")


def read_json(path: str | Path, limit: int = MOST_JSON) -> dict[str, Any]:
    """Read the object in a JSON file of at most `limit` bytes. Raises DiffbitError if the file is missing, unreadable,
    larger, or not an object."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())  # a read takes as much memory as it may read
            data = file.read((min(limit, status.st_size) if stat.S_ISREG(status.st_mode) else limit) + 1)
        if len(data) > limit:
            raise DiffbitError(f"{path}: is larger than {size_text(limit)}, the most that is read of such a file")
        return parse_json(data, path)
    except FileNotFoundError:
        raise DiffbitError(f"{path}: no such file") from None
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None


def parse_json(data: bytes, path: Path | str) -> dict[str, Any]:
    """Return the object in a file's JSON. Raises DiffbitError if it is not an object."""
    try:
        value = json.loads(data.decode("utf-8"))
        if b"\\ud" in data.lower():  # half of a surrogate pair can be escaped, but is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DiffbitError(f"{path}: has {error.object[error.start]!r}, no character; restore the file") from None
    except UnicodeDecodeError as error:
        raise DiffbitError(f"{path}: is not UTF-8 (byte {error.start}); convert or restore the file") from None
    except (ValueError, RecursionError) as error:  # ValueError also for an integer with thousands of digits
        raise DiffbitError(f"{path}: is not valid JSON ({error}); restore the file") from None
    if not isinstance(value, dict):
        raise DiffbitError(f"{path}: contains a JSON {type(value).__name__}, wanted an object")
    return value


def write_json(path: str | Path, value: object) -> None:
    """Write `value` as indented JSON."""
    with write_atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def json_sha256(value: Mapping[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the canonical JSON of an object without its field `sha256`."""
    content = {key: part for key, part in value.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def write_sealed(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, together with its `json_sha256`."""
    write_json(path, {**value, "sha256": json_sha256(value)})


def read_sealed(path: str | Path, restore: str) -> dict[str, Any]:
    """Read what `write_sealed` wrote. Raises DiffbitError if the file was changed. restore: advice for the message."""
    try:
        value = read_json(path)
    except DiffbitError as error:
        raise DiffbitError(f"{error}; or {restore}") from None
    if value.pop("sha256", None) != json_sha256(value):
        raise DiffbitError(f"{path}: is damaged, or from an earlier diffbit; restore the file, or {restore}")
    return value


def check_sha256(path: Path, sha256: object, restore: str) -> None:
    """Raise DiffbitError if a file is missing or does not have this hash. restore: advice for the message."""
    try:
        if sha256_file(path) == sha256:
            return
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be read ({error.strerror}); restore the file, or {restore}") from None
    raise DiffbitError(f"{path}: is damaged: it has changed since it was written; restore the file, or {restore}")


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal, read in parts."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_text(nbytes: float) -> str:
    """Return a size with the unit in which it is at least 1, such as "1.5 GB" or "20.3 kB"."""
    unit = next((unit for unit in ("gb", "mb", "kb") if nbytes >= UNITS[unit]), None)
    return f"{nbytes:.0f} bytes" if unit is None else f"{nbytes / UNITS[unit]:.1f} {unit.upper().replace('K', 'k')}"


def parse_size(text: str) -> int:
    """Return bytes of a size such as "40MB" (40,000,000), "40MiB" (41,943,040), "1.2GB" or "800kB". Raises DiffbitError
    for other text."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise DiffbitError(f"{text!r} is not a size; wanted a number with a unit, such as 40MB, 40MiB or 1.2GB")
    return int(float(match[1]) * UNITS[match[2]])
