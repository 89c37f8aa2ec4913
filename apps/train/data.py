"""The tokenizer of a run; the rows of training text and their order, which depend only on text, length and seed.

The documents form one stream of tokens, `eos d1 eos d2 ... eos`. An epoch cuts it into rows of length + 1 tokens. Each
row begins with the last token of the previous row, so every token is predicted once. Each epoch draws a new start for
the first row, which changes the tokens that no row contains (fewer than 2 * length at the two ends). The rows of all
epochs form one endless sequence; each step takes the next batch_size * accumulate * world_size of them.

A share of the rows may have needles (calib_data/needles.py). The seed and the row's number determine which rows and
which needles. Such a row has 1 to `max_needles` needles with one query each; together they fill at most half of it.

The model, the number of processes and a restart have no influence: a matched pair of models sees the same batches in
the same order, N processes together see what one process sees with N times the batch, and a resumed run continues
where it stopped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...calib_data import VALUE, Corpus, Needles, TextTokenizer, load_tokenizer
from ...io.errors import DiffbitError
from ...io.tokenizer_files import TOKENIZER, open_tokenizer, tokenizer_files
from .config import TrainConfig
from .new_tokenizer import files_of, trained


class TrainingRows:
    """The endless sequence of training rows over a stream of token ids int64 [T].

    `share`: the fraction of rows with needles. `learned`: which tokens the loss counts, bool [T]; None: all. Raises
    DiffbitError for a stream of fewer than 2 * length tokens.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        seed: int,
        needles: Needles | None = None,
        share: float = 0.0,
        learned: np.ndarray | None = None,
    ) -> None:
        self.per_epoch = (len(tokens) - length) // length  # for every start of the first row in [0, length)
        if self.per_epoch < 1:
            raise DiffbitError(
                f"the training text has {len(tokens)} tokens, but rows of {length} need {2 * length} or more; "
                f"give more text, or shorter rows (--context {max(2, len(tokens) // 2)})"
            )
        self.tokens, self.length, self.seed, self.learned = tokens, length, seed, learned
        self.needles, self.share = needles, share
        if needles is not None:
            self.max_needles = min(len(needles.words), length // (4 * needles.size))
            needles.check(length, max(self.max_needles, 1), 1)
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def take(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows first ... first + count - 1 of the sequence, int64 [count, length + 1], and a mask of the
        tokens that answer a query, bool of the same shape."""
        rows, answers = zip(*(self._row(number) for number in range(first, first + count)), strict=True)
        return np.stack(rows), np.stack(answers)

    def counted(self, first: int, count: int) -> np.ndarray:
        """Return which tokens of these rows the loss counts, bool [count, length + 1]. Rows with needles replace tokens
        of the text; those answers count, too (`take`)."""
        if self.learned is None:
            return np.ones((count, self.length + 1), dtype=bool)
        starts = [self._start(number) for number in range(first, first + count)]
        return np.stack([self.learned[start : start + self.length + 1] for start in starts])

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        start = self._start(number)
        row, answers = self.tokens[start : start + self.length + 1], np.zeros(self.length + 1, dtype=bool)
        if self.needles is None:
            return row, answers
        generator = np.random.default_rng([self.seed, number, 1])  # three numbers, so it differs from an epoch's
        if generator.random() >= self.share:
            return row, answers
        count = int(generator.integers(1, self.max_needles + 1))
        row, starts, _ = self.needles.insert(row, count, count, generator)
        answers[starts[:, None] + np.arange(VALUE)] = True
        return row, answers

    def _start(self, number: int) -> int:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            offset = generator.integers(self.length)
            self._starts = offset + self.length * generator.permutation(self.per_epoch)
            self._epoch = epoch
        return int(self._starts[index])


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer files of a run's model by name, and the id of its eos token."""

    files: dict[str, bytes]
    eos_id: int

    def open(self, path: Path) -> TextTokenizer:
        """path: for messages."""
        data = self.files[TOKENIZER]
        return TextTokenizer(open_tokenizer(data, path), self.eos_id, hashlib.sha256(data).hexdigest(), path)


def prepare_tokenizer(config: TrainConfig, text: Corpus) -> TokenizerFiles:
    """Return the run's tokenizer: one trained on the text, or the given one, whose eos token is also bos. A model that
    training starts from keeps all its tokenizer files: chat template, special tokens, generation settings. Raises
    DiffbitError for one that does not fit the vocabulary."""
    vocab_size = config.model.vocab_size
    if config.tokenizer is None:
        new = TokenizerFiles(trained(text.documents, vocab_size), 0)
        if (size := new.open(Path(TOKENIZER)).vocab_size) < vocab_size:
            raise DiffbitError(
                f"{config.source}: too little text for a vocabulary of {vocab_size} ids, it is enough for {size}; "
                "use more text or a smaller vocabulary"
            )
        return new
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise DiffbitError(
            f"{config.tokenizer}: the tokenizer has {tokenizer.vocab_size} ids, more than the model's vocabulary of "
            f"{vocab_size}; set the model's vocabulary to that size"
        )
    if config.init is not None:
        return TokenizerFiles(tokenizer_files(Path(config.tokenizer)), tokenizer.eos_id)
    return TokenizerFiles(files_of(tokenizer.backend, tokenizer.eos_id), tokenizer.eos_id)
