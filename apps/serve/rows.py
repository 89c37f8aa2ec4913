"""The caches of several texts that share a session's weights: each text is a row of one batch, with a length of its
own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...io.errors import DiffbitError
from ...runtime import Logits, Session

REST = -1  # the length of a row that a run leaves alone


class RowCaches:
    """Zeroed caches of `count` rows, each of the session's capacity. `run` writes them in place.

    Raises DiffbitError if the system cannot map them.
    """

    def __init__(self, session: Session, count: int) -> None:
        too_many = DiffbitError(f"{count} rows of {session.capacity} tokens are too many; use fewer rows")
        if count * session.capacity > 1 << 31:
            raise too_many
        self._buffers = session.artifact.cache.buffers
        try:
            self._arrays = session.empty_cache(count)
        except (OSError, OverflowError, MemoryError):  # more than the system can map
            raise too_many from None
        self._session, self._binding = session, session.io_binding()
        self._bound = slice(0, 0)  # the rows that the binding reads and writes

    @staticmethod
    def fit(session: Session) -> bool:
        """Whether the session can have rows: on a CPU, with the native library, if attention's operator has all of the
        cache."""
        buffers = session.artifact.cache.buffers.values()
        in_place = all(buffer.holds_tokens and buffer.in_place != "never" for buffer in buffers)
        return in_place and session.takes_lengths and session.native and session.device == "cpu"

    def run(self, rows: slice, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Logits:
        """Append ids [n, S] to rows of `lengths` [n] tokens, REST for a row that is left alone; return the logits
        [n, V] after the last of them. Several rows take few tokens at once."""
        if rows != self._bound:
            for name, cache in self._arrays.items():
                part = cache[rows]
                for bind, side in (
                    (self._binding.bind_input, "past_key_values"),
                    (self._binding.bind_output, "present"),
                ):
                    bind(f"{side}.{name}", "cpu", 0, part.dtype.type, part.shape, part.ctypes.data)
            self._bound = rows
        longest, steps = int(lengths.max()), ids.shape[1]
        mask = np.ones((len(ids), longest + steps), np.int64)
        positions = np.maximum(lengths, 0)[:, None] + np.arange(steps)
        return self._session.run(self._binding, ids, mask, positions, last=True, shorter_by=longest - lengths)[:, -1]

    def recent(self, row: int) -> dict[str, NDArray[Any]]:
        """A copy of a row's residual windows; none if the cache has rings, whose copies would be large."""
        if any(buffer.ring for buffer in self._buffers.values()):
            return {}
        return {name: self._arrays[name][row].copy() for name, buffer in self._buffers.items() if not buffer.grows}

    def first(self, row: int, count: int) -> dict[str, NDArray[Any]]:
        """Where a row has its first `count` tokens, and what it has of fixed size."""
        return {name: self._arrays[name][row][buffer.first(count)] for name, buffer in self._buffers.items()}

    def put(self, row: int, count: int, values: dict[str, NDArray[Any]]) -> None:
        """Write what `first` of so many tokens, or `recent`, has returned."""
        places = self.first(row, count)
        for name, array in values.items():
            places[name][...] = array
