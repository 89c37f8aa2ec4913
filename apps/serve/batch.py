"""Continuous batching: several texts share a session, each in a row of one batch. A step reads the weights only once.

The tokens of a row may lie in any slots of its cache as long as they are in order; the attention mask marks them. A new
text is therefore prefilled alone, in its own row of the buffers, and joins the others at the next step, whatever their
lengths; its unused slots are padding. A finished row keeps its tokens until another text takes the row. A new text
reuses the longest prefix that any row holds, copied if necessary: earlier turns of a conversation, or a shared system
prompt.

This needs buffers of which `RowCaches` can hold several rows. Other sessions have one row and compute one text after
the other; `Rows.of` chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...runtime import Logits, RowCaches, Session

HOLE = -1  # a slot of the cache without a token
WORTH_COPYING = 16  # tokens: a prefix in another row is copied if it is longer by at least as many


class Rows(ABC):
    """At most `count` texts at a time. `begin` takes a row, `step` continues it, and `end` frees it."""

    def __init__(self, session: Session, count: int) -> None:
        self.session, self.count = session, count
        self.capacity = session.capacity
        self._taken = np.zeros(count, bool)

    @staticmethod
    def of(session: Session, count: int) -> Rows:
        """Return `count` rows if the session's cache allows it, else one."""
        return _Batch(session, count) if count > 1 and RowCaches.fit(session) else _Single(session, 1)

    @property
    def free(self) -> int:
        """Number of rows that no text uses."""
        return int((~self._taken).sum())

    def end(self, row: int) -> None:
        """Free a row. Its tokens stay, for texts with the same beginning."""
        self._taken[row] = False

    @abstractmethod
    def begin(self, token_ids: Sequence[int], go_on: Callable[[], bool]) -> tuple[int, int, Logits | None]:
        """Take a row for a prompt -> (row, number of cached tokens, logits [V] after the prompt).

        go_on is called before each part of the prompt; if it returns False, the logits are None and the row stays free.
        """

    @abstractmethod
    def step(self, tokens: Mapping[int, int]) -> dict[int, Logits]:
        """Append {row: token}, for every taken row with room -> {row: logits [V] after the token}."""

    @abstractmethod
    def room(self, row: int) -> int:
        """Return how many more tokens fit into the row."""


class _Single(Rows):
    def begin(self, token_ids: Sequence[int], go_on: Callable[[], bool]) -> tuple[int, int, Logits | None]:
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


class _Batch(Rows):
    def __init__(self, session: Session, count: int) -> None:
        super().__init__(session, count)
        self._caches = RowCaches(session, count)
        self._ids = np.full((count, self.capacity), HOLE, np.int64)
        self._used = np.zeros(count, np.int64)  # number of the text that last took each row
        self._whole = np.zeros(count, np.int64)  # tokens in whole blocks of a prompt, from the beginning
        self._texts = 0
        self._end = 0  # from this slot on, every taken row is free

    def room(self, row: int) -> int:
        return self.capacity - int((self._ids[row] != HOLE).sum())

    def begin(self, token_ids: Sequence[int], go_on: Callable[[], bool]) -> tuple[int, int, Logits | None]:
        ids = np.asarray(token_ids, np.int64)
        row, cached = self._prepare(ids)
        logits: Logits | None = None
        for start in range(cached, len(ids), self.session.chunk):
            if not go_on():
                return row, cached, None
            part = ids[None, start : start + self.session.chunk]
            end = start + part.shape[1]
            logits = self._caches.run(
                slice(row, row + 1), part, np.ones((1, end), np.int64), np.arange(start, end)[None]
            )
            self._ids[row, start:end] = part
            if part.shape[1] == self.session.chunk and start == self._whole[row]:
                self._whole[row] = end
        assert logits is not None
        self._taken[row] = True
        self._end = int(self._ends()[self._taken].max())
        return row, cached, logits[0]

    def step(self, tokens: Mapping[int, int]) -> dict[int, Logits]:
        if self._end == self.capacity:
            for row in tokens:
                self._keep(row, row, self.capacity - self.room(row))
            self._end = int(self._ends()[self._taken].max())
        count, slot = max(tokens) + 1, self._end
        rows = slice(0, count)
        new = np.full(count, HOLE, np.int64)
        new[list(tokens)] = list(tokens.values())
        self._ids[rows, slot:] = HOLE  # tokens of free rows are overwritten
        mask = (np.column_stack((self._ids[rows, :slot], new)) != HOLE).astype(np.int64)
        positions = np.maximum(mask.sum(1, keepdims=True) - 1, 0)
        logits = self._caches.run(rows, np.maximum(new, 0)[:, None], mask, positions)
        self._ids[rows, slot] = new  # now that their keys and values are there
        self._end = slot + 1
        return {row: logits[row] for row in tokens}

    def _ends(self) -> NDArray[np.int64]:
        """[count]: the slot after each row's last token."""
        filled = self._ids != HOLE
        return np.where(filled.any(1), self.capacity - filled[:, ::-1].argmax(1), 0)

    def _prepare(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Put the longest prefix of a prompt that any row holds into a free row. Returns the row and the length of the
        prefix, which leaves at least one token to compute."""
        common = np.array([self._common(row, ids[:-1]) for row in range(self.count)])
        free = np.flatnonzero(~self._taken)
        longest = free[common[free] == common[free].max()]
        row = int(longest[self._used[longest].argmin()])
        best = int(common.argmax())
        source = best if common[best] >= common[row] + WORTH_COPYING else row
        self._keep(row, source, int(common[source]))
        self._texts += 1
        self._used[row] = self._texts
        return row, int(common[source])

    def _common(self, row: int, ids: NDArray[np.int64]) -> int:
        cached = self._ids[row][self._ids[row] != HOLE][: len(ids)]
        differ = cached != ids[: len(cached)]
        equal = int(differ.argmax()) if differ.any() else len(cached)
        return self.session.reusable(equal, int(self._whole[row]))

    def _keep(self, row: int, source: int, count: int) -> None:
        """Copy the first `count` tokens of `source` to the start of `row`, as its only tokens."""
        slots = np.flatnonzero(self._ids[source] != HOLE)[:count]
        if source != row or (slots != np.arange(count)).any():
            for name, cache in self._caches.arrays.items():
                rows = np.moveaxis(cache, self._caches.axes[name], 1)
                rows[row, :count] = rows[source, slots]
        ids = self._ids[source, slots]
        self._ids[row] = HOLE
        self._ids[row, :count] = ids
        self._whole[row] = min(count, int(self._whole[source]))
