"""Key-value needles in held-out text: a task that a model solves only if its attention finds the right positions.

This is the multi-needle setup of the Differential Transformer (arXiv 2410.05258, section 3.4) with needles made from
the model's own vocabulary, so it needs no other data. A row of `length` tokens is text (the haystack) with N needles
inserted and R queries at its end:

    ... text ...                          ... text ...
    @ node = path string                  @ error = used class               <- needles, N in all
    ... text ...
    @ node = path string                                                     <- a query; its answer is scored
    @ error = used class                                                     <- queries, R in all, in random order

A key is one word and a value is VALUE words. All are drawn at random for every needle, so nothing in the weights helps,
and a guess among W words is right with probability W^-VALUE. A word is a token that decodes to a space and lower-case
letters. The keys of a row differ. Needle n of N lies at a random position in the n-th of N equal parts of the haystack,
so every depth occurs. Each needle begins and ends with a line break, wherever it cuts the text.

A query is correct if every token of its answer is the most likely one given all tokens before it (teacher forcing).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..io.errors import DiffbitError
from .sources import Split
from .text_tokenizer import TextTokenizer, load_tokenizer
from .window import Windows, digest, eval_windows

BEFORE, BETWEEN = "\n@", " ="  # text before a key, and between a key and its value
VALUE = 2  # words
MIN_WORDS = 64
MAX_WORDS = 512  # those with the smallest ids, which are the most frequent in a BPE


@dataclass(frozen=True)
class Needles:
    """The tokens that needles are made of."""

    before: np.ndarray  # int64, the tokens of BEFORE
    between: np.ndarray  # int64, the tokens of BETWEEN
    after: np.ndarray  # int64, the tokens of the line end
    words: np.ndarray  # int64 [W], for keys and values

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Needles:
        """Return the tokens of a tokenizer. Raises DiffbitError if its vocabulary has too few words."""
        texts = (tokenizer.backend.decode([id], skip_special_tokens=False) for id in range(tokenizer.vocab_size))
        words = [id for id, text in enumerate(texts) if re.fullmatch(" [a-z]{3,}", text)]
        if len(words) < MIN_WORDS:
            raise DiffbitError(
                f"the tokenizer has {len(words)} tokens that are a space and a lower-case word, but needles "
                f"need {MIN_WORDS}; use a larger vocabulary"
            )
        before, between, after = tokenizer.encode((BEFORE, BETWEEN, "\n"))
        return cls(before, between, after, np.array(words[:MAX_WORDS]))

    @property
    def size(self) -> int:
        """Number of tokens in a needle."""
        return len(self.before) + 1 + len(self.between) + VALUE + len(self.after)

    def check(self, length: int, count: int, queries: int) -> None:
        """Raise DiffbitError if rows of `length` tokens cannot hold `count` needles and `queries` queries."""
        if not 1 <= queries <= count:
            raise DiffbitError(f"{queries} queries for {count} needles; wanted 1 to {count}")
        if count > len(self.words):
            raise DiffbitError(f"{count} needles need {count} keys, but the vocabulary has {len(self.words)} words")
        if (needed := (count + queries) * self.size) > length // 2:
            raise DiffbitError(
                f"{count} needles and {queries} queries take {needed} tokens, more than half of {length}; "
                "use fewer, or longer rows"
            )

    def insert(
        self, text: np.ndarray, count: int, queries: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Insert needles into text int64 [T] -> (ids [T], where the answers to the queries begin [R], the depths of
        their needles [R], from 0 (the beginning) to 1 (just before the queries)). The text is truncated to make room.
        """
        keys = generator.choice(self.words, count, replace=False)
        values = generator.choice(self.words, (count, VALUE))
        needles = [
            np.concatenate((self.before, [key], self.between, value, self.after))
            for key, value in zip(keys, values, strict=True)
        ]
        room = len(text) - (count + queries) * self.size
        positions = ((np.arange(count) + generator.random(count)) / count * (room + 1)).astype(np.int64)
        chosen = generator.choice(count, queries, replace=False)
        parts, begin = [], 0
        for position, needle in zip(positions, needles, strict=True):
            parts += [text[begin:position], needle]
            begin = position
        parts += [text[begin:room], *(needles[number] for number in chosen)]
        lead = self.size - VALUE - len(self.after)
        starts = len(text) - queries * self.size + lead + self.size * np.arange(queries)
        return np.concatenate(parts), starts, positions[chosen] / max(room, 1)


@dataclass(frozen=True)
class NeedleWindows:
    """Rows with needles: windows whose targets are the tokens of the answers."""

    windows: Windows
    starts: np.ndarray  # int64 [n, R], the position in the window at which each answer (VALUE tokens) begins
    depths: np.ndarray  # float64 [n, R], depth of the needle that answers each query, 0 to 1
    needles: int  # N, in each row


def needle_windows(
    source: str,
    tokenizer_path: str | Path,
    length: int,
    needles: int,
    queries: int,
    count: int,
    *,
    split: Split = "eval",
    field: str = "text",
    seed: int = 0,
) -> NeedleWindows:
    """`count` rows of one split of a source (`load_text`). The same arguments give the same rows.

    If the text fills fewer rows, it is used repeatedly, with different needles. Raises DiffbitError if a row cannot
    hold the needles, the vocabulary has too few words, or the text fills no row.
    """
    if count < 1:
        raise DiffbitError(f"the number of rows with needles is {count}, wanted 1 or more")
    words = Needles.of(load_tokenizer(tokenizer_path))
    words.check(length, needles, queries)
    cut = eval_windows(source, tokenizer_path, length, count, split=split, field=field, keep_partial=False)
    generator = np.random.default_rng([seed, length, needles, queries])
    rows = [words.insert(cut.ids[row % len(cut.ids)], needles, queries, generator) for row in range(count)]
    ids, starts, depths = (np.stack(parts) for parts in zip(*rows, strict=True))
    mask, target = np.ones(ids.shape, dtype=bool), np.zeros(ids.shape, dtype=bool)
    for offset in range(VALUE):
        np.put_along_axis(target, starts + offset, True, axis=1)
    windows = Windows(ids, mask, target, digest(ids, mask, target), source, cut.tokens, cut.unused, cut.documents)
    return NeedleWindows(windows, starts, depths, needles)
