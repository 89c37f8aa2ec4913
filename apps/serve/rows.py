"""The caches of several texts that share a session's weights: each text is a row of one batch, of its own length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...io.errors import DiffbitError
from ...runtime import Logits, Session
from .pages import Pages, Prefix

REST = -1  # the length of a row that a run leaves alone
WORTH_SHARING = 128  # tokens: what two rows have in common is moved to a prefix if it is longer by as many


class RowCaches:
    """A `cache` of `count` rows, each of the session's capacity. `run` writes it in place. Rows take the memory that
    their tokens have written (pages.py).

    Raises DiffbitError if the system cannot map them.
    """

    def __init__(self, session: Session, count: int) -> None:
        self._session, self.cache = session, session.empty_cache()
        try:
            if count * session.capacity > 1 << 31:
                raise OverflowError
            self.cache.begin(count, session.block)
        except (OSError, OverflowError, MemoryError):  # more than the system can map
            raise DiffbitError(f"{count} rows of {session.capacity} tokens are too many; use fewer rows") from None
        self._buffers, self._arrays = self.cache.buffers, self.cache.arrays
        self._pages = Pages(self._arrays)
        none: tuple[Prefix | None, int] = (None, 0)
        self._prefix = count * [none]  # of each row, and how many of its tokens
        self._written = np.zeros(count, np.int64)  # tokens that each row has memory for
        spec = session.artifact.cache
        self._fixed, self._growth = spec.fixed_bytes, spec.bytes_per_1k_tokens // 1000

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
        self.cache.bind(rows)
        longest, steps = int(lengths.max()), ids.shape[1]
        self._written[rows] = np.maximum(self._written[rows], lengths + steps)
        mask = np.ones((len(ids), longest + steps), np.int64)
        positions = np.maximum(lengths, 0)[:, None] + np.arange(steps)
        try:
            return self._session.run(self.cache, ids, mask, positions, last=True, shorter_by=longest - lengths)[:, -1]
        except BaseException:  # residual windows may be ahead of the tokens
            for row in np.arange(rows.start, rows.stop)[lengths != REST].tolist():
                self.forget(row)
            raise

    def recent(self, row: int) -> dict[str, NDArray[Any]]:
        """Return a copy of a row's residual windows; none if the cache has rings, whose copies would be large."""
        if any(buffer.ring for buffer in self._buffers.values()):
            return {}
        return {name: self._arrays[name][row].copy() for name, buffer in self._buffers.items() if not buffer.grows}

    def first(self, row: int, count: int) -> dict[str, NDArray[Any]]:
        """Return where a row has its first `count` tokens, and what it has of fixed size."""
        return {name: self._arrays[name][row][buffer.first(count)] for name, buffer in self._buffers.items()}

    def put(self, row: int, count: int, values: dict[str, NDArray[Any]]) -> None:
        """Write what `first` of `count` tokens, or `recent`, has returned."""
        places = self.first(row, count)
        for name, array in values.items():
            places[name][...] = array
        self._written[row] = max(self._written[row], count)

    def share(self, row: int, source: int, count: int) -> None:
        """Make the first `count` tokens of `source`, which may be the row itself, the only ones of `row`: by reference
        where that saves memory."""
        prefix, length = self._prefix[source]
        if row != source and count >= length + WORTH_SHARING:
            prefix = self._pages.keep(source, count, self._growing(count))
            length = count if prefix else 0
            self._prefix[source] = prefix, length
        length = min(length, count)
        if row != source or not count:
            self.forget(row)
        self._prefix[row] = (prefix, length) if length else (None, 0)  # whose file goes with its last row
        if row != source:
            if prefix and length:
                self._pages.share(row, source, self._growing(length), prefix)
            for name, buffer in self._buffers.items():
                rest = buffer.first(count, length)
                self._arrays[name][row][rest] = self._arrays[name][source][rest]
            self._written[row] = count
        self.cache.keep(row, source, count)
        if recent := self.cache.recent[row].get(count):
            self.put(row, count, recent)

    def forget(self, row: int) -> None:
        """Forget a row's tokens and give its memory back."""
        self.cache.keep(row, row, 0)
        self._pages.free(row)
        self._prefix[row], self._written[row] = (None, 0), 0

    def nbytes(self, lengths: Mapping[int, int]) -> int:
        """Return the memory that all rows take, a prefix once, when these rows have these lengths."""
        written = self._written.copy()
        for row, length in lengths.items():
            written[row] = max(written[row], length)
        tokens = int(written.sum()) - sum(shared for _, shared in self._prefix)
        tokens += sum(prefix.tokens for prefix in {prefix for prefix, shared in self._prefix if prefix and shared})
        return int(np.count_nonzero(written)) * self._fixed + tokens * self._growth

    def _growing(self, count: int) -> dict[str, tuple[slice, ...]]:
        return {name: buffer.first(count) for name, buffer in self._buffers.items() if buffer.grows}
