"""Prefixes on disk: what several prompts begin with, such as a system prompt, is computed once, also across restarts.

A file FOLDER/MANIFEST/NAME.safetensors has the buffers of one row with n tokens, the tokens themselves as `ids`, and
the SHA-256 of all numbers in its metadata. MANIFEST is the beginning of the artifact's SHA-256, so another export of a
model reads none of them. A file that does not fit, or whose numbers have changed, is deleted and computed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...cli import remark
from ...io.errors import DiffbitError
from ...io.files import write_atomic
from ...runtime import Artifact

IDS, DIGEST = "ids", "sha256"
LEAST = 64  # tokens of a prefix that is worth a file
DAMAGED = SafetensorError, OSError, TypeError, ValueError  # the last two: a type that numpy does not have
Arrays = dict[str, NDArray[Any]]


class PrefixFiles:
    """The prefixes of an artifact in a folder, of at most `limit` bytes: the ones that were not used for the longest
    time are deleted. Several servers may have the same folder. Raises DiffbitError if it cannot be written."""

    def __init__(self, folder: Path, artifact: Artifact, limit: int) -> None:
        self.folder, self.limit = folder / artifact.sha256[:16], limit
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiffbitError(f"{folder}: cannot write to this folder ({error.strerror}); choose another") from None
        self._ids: dict[Path, NDArray[np.int64]] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, "numpy") as opened:
                    ids = opened.get_tensor(IDS)
            except DAMAGED:
                ids = np.zeros(0)
            if ids.dtype == np.int64 and ids.ndim == 1:
                self._ids[file] = ids
            else:
                self._forget(file)

    def longest(self, ids: NDArray[np.int64]) -> tuple[int, Path | None]:
        """Return the longest prefix of a prompt that a file has."""
        fitting = ((len(known), file) for file, known in self._ids.items() if np.array_equal(known, ids[: len(known)]))
        return max(fitting, default=(0, None))

    def load(self, file: Path, expected: Mapping[str, NDArray[Any]]) -> Arrays | None:
        """Return the buffers in a file, which have the types and shapes of `expected`; None if they are damaged."""
        try:
            with safe_open(file, "numpy") as opened:
                arrays = {name: opened.get_tensor(name) for name in expected}
                digest = (opened.metadata() or {}).get(DIGEST)
            os.utime(file)
        except DAMAGED:
            arrays, digest = {}, None
        kinds = [{name: (array.dtype, array.shape) for name, array in some.items()} for some in (arrays, expected)]
        if kinds[0] == kinds[1] and digest == _digest(self._ids[file], arrays):
            return arrays
        self._forget(file)
        return None

    def save(self, ids: NDArray[np.int64], arrays: Arrays) -> None:
        """Write the buffers of a row that has the tokens `ids`. A full disk costs the file and nothing else."""
        file = self.folder / f"{hashlib.sha256(ids.tobytes()).hexdigest()[:32]}.safetensors"
        tensors = {IDS: ids, **{name: np.ascontiguousarray(array) for name, array in arrays.items()}}
        try:
            with write_atomic(file) as temporary:
                save_file(tensors, temporary, {DIGEST: _digest(ids, arrays)})
        except (SafetensorError, OSError, DiffbitError) as error:
            remark(f"a prefix of {len(ids)} tokens was not written ({error})")
            return
        self._ids[file] = ids
        sizes = {}
        for path in self.folder.glob("*.safetensors"):  # other servers may share the folder, and delete files
            with suppress(OSError):
                sizes[path] = path.stat()
        for path in sorted(sizes, key=lambda path: sizes[path].st_mtime_ns):
            if sum(status.st_size for status in sizes.values()) <= self.limit:
                break
            del sizes[path]
            self._forget(path)

    def _forget(self, file: Path) -> None:
        self._ids.pop(file, None)
        with suppress(OSError):  # a folder of this name, or one that may only be read
            file.unlink()


def _digest(ids: NDArray[np.int64], arrays: Arrays) -> str:
    hasher = hashlib.sha256(ids.tobytes())
    for name in sorted(arrays):
        hasher.update(np.ascontiguousarray(arrays[name]).data)
    return hasher.hexdigest()
