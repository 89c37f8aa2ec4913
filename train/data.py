"""The order in which training sees its text: a function of (text, length, seed) and nothing else.

The documents are one stream of tokens, `eos d1 eos d2 ... eos`. An epoch cuts it into rows of length + 1 tokens, each
beginning on the last token of the one before, so that every token is predicted once; where the first row begins is
drawn anew for each epoch, so the tokens that no row reaches (fewer than 2 * length at the two ends) change. The rows
of all epochs form one endless sequence. Step s takes the next batch_size * accumulate * world_size rows of it.

A share of the rows may be needle rows (calib_data/needles.py): which ones, and what they hold, depends on the seed and
the row's number alone. Such a row has 1 to `most` needles, all of them asked for, where `most` fill half of it.

Model, number of processes and a restart do not enter: a matched pair of models sees the same batches in the same
order, N processes together see what one sees with N times the batch, and a resumed run goes on where it stopped.
"""

from __future__ import annotations

import numpy as np

from ..calib_data import VALUE, Needles
from ..errors import DiffbitError


class Rows:
    """The endless sequence of training rows over a stream of token ids [T]."""

    def __init__(
        self, tokens: np.ndarray, length: int, seed: int, needles: Needles | None = None, share: float = 0.0
    ) -> None:
        self.per_epoch = (len(tokens) - length) // length  # holds for every offset in [0, length)
        if self.per_epoch < 1:
            raise DiffbitError(
                f"the training text has {len(tokens)} tokens, but rows of {length} need {2 * length} or more; "
                "give more text or a shorter context"
            )
        self.tokens, self.length, self.seed = tokens, length, seed
        self.needles, self.share = needles, share
        if needles is not None:
            self.most = min(len(needles.words), length // (4 * needles.size))
            needles.check(length, max(self.most, 1), 1)
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def take(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows first ... first + count - 1 of the sequence, int64 [count, length + 1]; and, bool, answers' tokens."""
        rows, answers = zip(*(self._row(number) for number in range(first, first + count)), strict=True)
        return np.stack(rows), np.stack(answers)

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        start = self._start(number)
        row, answers = self.tokens[start : start + self.length + 1], np.zeros(self.length + 1, dtype=bool)
        if self.needles is None:
            return row, answers
        generator = np.random.default_rng([self.seed, number, 1])  # a third number: not an epoch's
        if generator.random() >= self.share:
            return row, answers
        needles = int(generator.integers(1, self.most + 1))
        row, starts, _ = self.needles.insert(row, needles, needles, generator)
        for place in range(VALUE):
            answers[starts + place] = True
        return row, answers

    def _start(self, number: int) -> int:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            offset = generator.integers(self.length)
            self._starts = offset + self.length * generator.permutation(self.per_epoch)
            self._epoch = epoch
        return int(self._starts[index])
