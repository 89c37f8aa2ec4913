"""Key-value needles in held-out text: a task that a model solves only if its attention finds the right place.

The multi-needle setup of the Differential Transformer (arXiv 2410.05258, section 3.4), made from a model's own
vocabulary so that it needs no other data. A row of `length` tokens is a stretch of text (the haystack) with N needles
laid into it, and R of them asked for at its end:

    ... text ...                          ... text ...
    @ node = path string                  @ error = used class               <- needles, N in all
    ... text ...
    @ node = path string                                                     <- a query; its answer is scored
    @ error = used class                                                     <- R in all, in random order

A key is one word, a value VALUE words, drawn anew for every needle: nothing in the weights helps, and guessing one of
W words VALUE times is right W^-VALUE of the time (1 in 10,000 and less). A word is a token that reads as a blank and
small letters. Keys differ within a row. Needle n of N lies at a random place of the n-th of N equal parts of the
haystack, so that every depth occurs; a needle takes a line of its own, wherever the text is cut for it.

A query counts as right when every token of its answer is the most likely one, given all before it (teacher forcing).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DiffbitError
from .sources import Split, load_text
from .tokenizer import TextTokenizer, load_tokenizer
from .window import Windows, digest, windows

BEFORE, BETWEEN = "\n@", " ="  # what stands before a key, and between it and its value
VALUE = 2  # words
MOST_WORDS = 512  # of a large vocabulary: those with the smallest ids, which in a BPE are the most frequent
FEWEST_WORDS = 64


@dataclass(frozen=True)
class Needles:
    """How needles are written in a vocabulary."""

    before: np.ndarray  # int64, the tokens of BEFORE
    between: np.ndarray
    after: np.ndarray  # the end of the line
    words: np.ndarray  # int64 [W], keys and values are drawn from

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Needles:
        """The pieces of a needle under a tokenizer; a DiffbitError where its vocabulary holds too few words."""
        entries = [(id, text) for id, text in enumerate(_texts(tokenizer)) if re.fullmatch(" [a-z]{3,}", text)]
        if len(entries) < FEWEST_WORDS:
            raise DiffbitError(
                f"the tokenizer has {len(entries)} tokens that are a blank and a word of small letters, needles need "
                f"{FEWEST_WORDS}; take a larger vocabulary"
            )
        before, between, after = tokenizer.encode((BEFORE, BETWEEN, "\n"))
        return cls(before, between, after, np.array([id for id, _ in entries[:MOST_WORDS]]))

    @property
    def size(self) -> int:
        """Tokens of a needle."""
        return len(self.before) + 1 + len(self.between) + VALUE + len(self.after)

    def check(self, length: int, count: int, queries: int) -> None:
        """Refuse rows of `length` tokens that cannot hold `count` needles and `queries` queries."""
        if not 1 <= queries <= count:
            raise DiffbitError(f"{queries} queries of {count} needles: wanted 1 or more, and no more than needles")
        if count > len(self.words):
            raise DiffbitError(f"{count} needles need as many different keys, the vocabulary has {len(self.words)}")
        if (needed := (count + queries) * self.size) > length // 2:
            raise DiffbitError(
                f"{count} needles and {queries} queries take {needed} tokens, more than half of {length}; "
                "ask for fewer, or for longer rows"
            )

    def lay(
        self, text: np.ndarray, count: int, queries: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A row made of text [T]: ids [T], where the answers to its queries begin [R], and their needles' depths [R].

        A depth is from 0 (the beginning) to 1 (just before the queries). What the needles push out is the text's end.
        """
        keys = generator.choice(self.words, count, replace=False)
        values = generator.choice(self.words, (count, VALUE))
        needles = [
            np.concatenate((self.before, [key], self.between, value, self.after))
            for key, value in zip(keys, values, strict=True)
        ]
        kept = len(text) - (count + queries) * self.size
        places = ((np.arange(count) + generator.random(count)) / count * (kept + 1)).astype(np.int64)
        asked = generator.choice(count, queries, replace=False)
        pieces, begin = [], 0
        for place, needle in zip(places, needles, strict=True):
            pieces += [text[begin:place], needle]
            begin = place
        pieces += [text[begin:kept], *(needles[number] for number in asked)]
        lead = self.size - VALUE - len(self.after)
        starts = len(text) - queries * self.size + lead + self.size * np.arange(queries)
        return np.concatenate(pieces), starts, places[asked] / max(kept, 1)


@dataclass(frozen=True)
class NeedleWindows:
    """Rows with needles, as windows whose targets are the answers' tokens."""

    windows: Windows
    starts: np.ndarray  # int64 [n, R]: where in its window an answer begins, VALUE tokens long
    depths: np.ndarray  # float64 [n, R]: of the needle asked for, 0 to 1
    needles: int  # N


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
    """`count` rows over one split of a source; the same for the same arguments, and different for another seed.

    With more rows than the text fills, it is used again, with other needles.
    """
    if count < 1:
        raise DiffbitError(f"{count} rows of needles were asked for, wanted 1 or more")
    tokenizer = load_tokenizer(tokenizer_path)
    kinds = Needles.of(tokenizer)
    kinds.check(length, needles, queries)
    corpus = load_text(source, split, field=field)
    cut = windows(
        tokenizer.encode(corpus.documents),
        length,
        eos_id=tokenizer.eos_id,
        max_windows=count,
        keep_partial=False,
        source=source,
    )
    generator = np.random.default_rng([seed, length, needles, queries])
    rows = [kinds.lay(cut.ids[row % len(cut.ids)], needles, queries, generator) for row in range(count)]
    ids, starts, depths = (np.stack(parts) for parts in zip(*rows, strict=True))
    mask, target = np.ones(ids.shape, dtype=bool), np.zeros(ids.shape, dtype=bool)
    for place in range(VALUE):
        np.put_along_axis(target, starts + place, True, axis=1)
    made = Windows(ids, mask, target, digest(ids, mask, target), source, cut.tokens, cut.unused, cut.documents)
    return NeedleWindows(made, starts, depths, needles)


def _texts(tokenizer: TextTokenizer) -> list[str]:
    """What each id reads as."""
    return [tokenizer.backend.decode([id], skip_special_tokens=False) for id in range(tokenizer.vocab_size)]
