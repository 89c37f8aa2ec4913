"""Continuous batching: several texts share a session, each in a row of one batch. A step reads the weights only once.

A new text is prefilled alone, in its own row of the buffers, and joins the others at the next step, whatever their
lengths. A finished row keeps its tokens until another text takes the row. A new text reuses the longest prefix that any
row holds, also of another row: earlier turns of a conversation, or a shared system prompt. A low-bit cache has the
recent tokens in 16 bits, and codes of the others: to cut it, copies of the recent tokens are kept, at the end of a
prompt and where two prompts part, the last MOST_RECENT of a row.

This needs buffers of which `RowCaches` can hold several rows. Other sessions have one row and compute one text after
the other; `Rows.of` chooses.

The memory of the caches may have a limit. Finished rows are forgotten first; then texts wait, or lose their rows and
are computed again (engine.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...io.errors import DiffbitError
from ...runtime import Logits, Session
from .prefixes import LEAST, PrefixFiles
from .rows import REST, RowCaches

MOST_RECENT = 4
LEAST_CAPACITY = 64  # tokens
WORTH_COPYING = 16  # tokens: a prefix in another row is taken if it is longer by at least as many


class NoRoom(Exception):
    """The rows' memory has no room for a text, until another one ends."""


class Rows(ABC):
    """At most `count` texts at a time. `begin` takes a row, `step` continues it, and `end` frees it."""

    def __init__(self, session: Session, count: int) -> None:
        self.session, self.count = session, count
        self.capacity = session.capacity
        self._taken = np.zeros(count, bool)

    @staticmethod
    def of(session: Session, count: int, prefixes: PrefixFiles | None = None, memory: int | None = None) -> Rows:
        """Return `count` rows if the session's cache allows it, else one. memory: most bytes of all rows. Raises
        DiffbitError if it does not allow it, and there are files of prefixes or a limit, or if that is too small."""
        if RowCaches.fit(session):
            plain = count == 1 and prefixes is None and memory is None
            return _Single(session, 1) if plain else _Batch(session, count, prefixes, memory)
        if prefixes or memory:
            option = "--cache-dir" if prefixes else "--cache-memory"
            raise DiffbitError(
                f"{session.artifact.path}: {option} needs a cache whose rows have lengths of their own; export the "
                f"artifact again, and serve it on the CPU with the native library, or omit {option}"
            )
        return _Single(session, 1)

    @property
    def free(self) -> int:
        """Number of rows that no text uses."""
        return int((~self._taken).sum())

    def end(self, row: int) -> None:
        """Free a row. Its tokens stay, for texts with the same beginning."""
        self._taken[row] = False

    @abstractmethod
    def begin(
        self, token_ids: Sequence[int], go_on: Callable[[], bool], more: int = 0
    ) -> tuple[int, int, Logits | None]:
        """Take a row for a prompt, with memory for `more` tokens -> (row, number of cached tokens, logits [V] after the
        prompt).

        go_on is called before each part of the prompt; if it returns False, the logits are None and the row stays free.
        Raises NoRoom.
        """

    def fits(self) -> bool:
        """Whether the memory has room for another token of every text; forgets finished texts for it."""
        return True

    @abstractmethod
    def step(self, tokens: Mapping[int, int]) -> dict[int, Logits]:
        """Append {row: token}, for every taken row with room -> {row: logits [V] after the token}."""

    @abstractmethod
    def room(self, row: int) -> int:
        """Return how many more tokens fit into the row."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that the caches' tokens take."""


class _Single(Rows):
    def begin(
        self, token_ids: Sequence[int], go_on: Callable[[], bool], more: int = 0
    ) -> tuple[int, int, Logits | None]:
        cached = self.session.reuse(token_ids)
        for start in range(cached, len(token_ids), self.session.chunk):
            if not go_on():
                return 0, cached, None
            logits = self.session.prefill([token_ids[start : start + self.session.chunk]])
        self._taken[0] = True
        return 0, cached, logits[0]

    def step(self, tokens: Mapping[int, int]) -> dict[int, Logits]:
        return {row: self.session.step([[token]])[0] for row, token in tokens.items()}

    def room(self, row: int) -> int:
        return self.capacity - self.session.length

    @property
    def nbytes(self) -> int:
        return self.session.artifact.cache.nbytes(self.session.length)


class _Batch(Rows):
    def __init__(self, session: Session, count: int, prefixes: PrefixFiles | None, memory: int | None) -> None:
        super().__init__(session, count)
        self._prefixes, self._memory = prefixes, memory
        if memory is not None:
            self.capacity = min(self.capacity, session.artifact.cache.longest(memory) or 0)
            if self.capacity < min(LEAST_CAPACITY, session.capacity):
                raise DiffbitError(
                    f"{session.artifact.path}: --cache-memory has room for {self.capacity} tokens, wanted at least "
                    f"{LEAST_CAPACITY}; a token takes {session.artifact.cache.bytes_per_1k_tokens // 1000} bytes"
                )
        self._caches = RowCaches(session, count)
        self._cache = self._caches.cache
        self._used = np.zeros(count, np.int64)  # number of the text that last took each row

    def room(self, row: int) -> int:
        return self.capacity - int(self._cache.lengths[row])

    @property
    def nbytes(self) -> int:
        return self._caches.nbytes({})

    def begin(
        self, token_ids: Sequence[int], go_on: Callable[[], bool], more: int = 0
    ) -> tuple[int, int, Logits | None]:
        ids = np.asarray(token_ids, np.int64)
        row, cached, shared = self._prepare(ids)
        if not self._fit({row: len(ids) + more}):
            if self._taken.any():
                raise NoRoom
            self._caches.forget(row)  # what it holds of another text takes the room
            cached = 0
        if cached == shared:
            self._store(row, shared)
        logits: Logits | None = None
        end = cached
        while end < len(ids):
            if not go_on():
                return row, cached, None
            start, end = end, min(end + self.session.chunk, len(ids))
            if start < shared < end:  # the next text with this beginning can begin here
                end = shared
            logits = self._caches.run(slice(row, row + 1), ids[None, start:end], np.array([start]))
            self._cache.append(row, start, ids[start:end])
            if end in (shared, len(ids)) and (recent := self._caches.recent(row)):
                self._cache.recent[row] = dict([*self._cache.recent[row].items(), (end, recent)][-MOST_RECENT:])
            if end == shared:
                self._store(row, end)
        assert logits is not None
        self._taken[row] = True
        return row, cached, logits[0]

    def step(self, tokens: Mapping[int, int]) -> dict[int, Logits]:
        count, rows, new = max(tokens) + 1, list(tokens), list(tokens.values())
        ids, lengths = np.zeros((count, 1), np.int64), np.full(count, REST)
        ids[rows, 0], lengths[rows] = new, self._cache.lengths[rows]
        logits = self._caches.run(slice(0, count), ids, lengths)
        self._cache.ids[rows, lengths[rows]] = new
        self._cache.lengths[rows] += 1
        return {row: logits[row] for row in tokens}

    def fits(self) -> bool:
        return self._fit({row: int(self._cache.lengths[row]) + 1 for row in range(self.count) if self._taken[row]})

    def _fit(self, lengths: Mapping[int, int]) -> bool:
        """Whether the memory has room if rows have these lengths; forgets finished rows to make room."""
        while self._memory is not None and self._caches.nbytes(lengths) > self._memory:
            idle = np.flatnonzero(~self._taken & (self._cache.lengths > 0))
            finished = [row for row in idle.tolist() if row not in lengths]
            if not finished:
                return False
            self._caches.forget(min(finished, key=lambda row: int(self._used[row])))
        return True

    def _prepare(self, ids: NDArray[np.int64]) -> tuple[int, int, int]:
        """Put the longest prefix of a prompt that any row can be cut to into a free row. Returns the row, the length of
        the prefix, which leaves at least one token to compute, and that of the longest prefix that any row holds of a
        text that goes on differently; a conversation only becomes longer."""
        equal, common = np.array([self._cache.reusable(row, ids[:-1]) for row in range(self.count)]).T
        shared = int(np.where(self._cache.lengths >= equal + WORTH_COPYING, equal, 0).max())
        free = np.flatnonzero(~self._taken)
        longest = free[common[free] == common[free].max()]
        row = int(longest[self._used[longest].argmin()])
        best = int(common.argmax())
        source = best if common[best] >= common[row] + WORTH_COPYING else row
        length = self._load(row, ids[:-1], int(common[source]))
        if not length:
            length = int(common[source])
            self._caches.share(row, source, length)
        self._used[row] = self._used.max() + 1
        return row, length, shared

    def _load(self, row: int, ids: NDArray[np.int64], length: int) -> int:
        """Read a prefix of more than `length` tokens from its file; return its length, or 0."""
        if self._prefixes is None:
            return 0
        count, file = self._prefixes.longest(ids)
        if file is None or count < length + WORTH_COPYING or count % self.session.block:
            return 0
        arrays = self._prefixes.load(file, self._caches.first(row, count))
        if arrays is None:
            return 0
        self._caches.forget(row)
        self._caches.put(row, count, arrays)
        self._cache.append(row, 0, ids[:count])
        if recent := self._caches.recent(row):
            self._cache.recent[row] = {count: recent}
        return count

    def _store(self, row: int, count: int) -> None:
        """Write all tokens of a row to a file."""
        ids = self._cache.ids[row, :count].copy()
        if self._prefixes is not None and count >= LEAST and self._prefixes.longest(ids)[0] < count:
            self._prefixes.save(ids, self._caches.first(row, count))
