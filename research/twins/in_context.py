"""Examples in context in several orders, as arXiv 2410.05258 (Figure 7) has them: a word of one of four kinds, then the
label of its kind, which is a word that has nothing to do with it. So only the examples say what is asked.

     horse: river
     Spain: table
     ...
     dog: river          <- asked; right if the label and the line break are the likeliest tokens
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from diffbit.calib_data import VALUE, NeedleWindows, Windows, load_tokenizer
from diffbit.calib_data.window import digest

KINDS = {  # label: words
    "river": "horse dog cat cow sheep bird lion tiger bear wolf rabbit mouse snake monkey elephant deer goat pig duck",
    "table": "France Germany Italy Spain China Japan India Russia Brazil Canada Mexico Egypt Kenya Greece Turkey",
    "paper": "hand foot head arm leg eye nose ear mouth knee neck finger shoulder tooth tongue skin heart brain lung",
    "music": "hammer knife saw drill rope ladder needle brush shovel pump wheel nail screw lever hook chain spoon pen",
}
EXAMPLES, ASKED = 4, 5  # words of each kind that are shown, and that are asked for


def orders(model: Path, count: int, seed: int = 0) -> list[NeedleWindows]:
    """`count` orders of the same examples, each with the same questions, one in a row."""
    tokenizer = load_tokenizer(model)

    def token(text: str) -> int | None:
        (ids,) = tokenizer.encode([text])
        return int(ids[0]) if len(ids) == 1 else None

    draw = np.random.default_rng(seed)
    colon, end = token(":"), token("\n")
    shown, asked = [], []
    for label, words in KINDS.items():
        known = draw.permutation([one for word in words.split() if (one := token(f" {word}")) is not None])
        lines = [[word, colon, token(f" {label}"), end] for word in known[: EXAMPLES + ASKED]]
        shown += lines[:EXAMPLES]
        asked += lines[EXAMPLES:]
    assert len(asked) == ASKED * len(KINDS), "the tokenizer has too few of the words"
    permuted = [[shown[i] for i in draw.permutation(len(shown))] for _ in range(count)]
    return [in_order([end, *chain.from_iterable(lines)], asked) for lines in permuted]


def in_order(before: list[int], asked: list[list[int]]) -> NeedleWindows:
    ids = np.array([before + line for line in asked])
    target = np.zeros(ids.shape, bool)
    target[:, -VALUE:] = True  # the label and the line break
    mask = np.ones_like(target)
    windows = Windows(ids, mask, target, digest(ids, mask, target), "examples in context", ids.size, 0, len(ids))
    starts = np.full((len(ids), 1), ids.shape[1] - VALUE)
    return NeedleWindows(windows, starts, np.zeros(starts.shape), len(before) // len(asked[0]))
