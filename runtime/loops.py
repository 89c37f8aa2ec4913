"""Finds texts that have run into a loop: small and quantized models may write the same words again and again, and never
an end token.

A text loops if its last tokens are one sequence of at most LONGEST tokens, TIMES or more times in a row, and at least
TOKENS tokens long. Only exact repetitions count: a table, a list of numbers or a series of similar lines of code is no
loop as long as anything in its rows differs. Rows that may well be equal (zeros of a matrix, rulers, empty cells,
"False, False, False") have fewer than WORDS different words, and must be PLAIN_TOKENS tokens long. So a sentence that a
user asks for twenty times, and a matrix of ten by ten zeros, are written to their end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

LONGEST = 96  # tokens of a sequence that is repeated
TIMES = 4
TOKENS, PLAIN_TOKENS = 192, 384  # of all its repetitions
WORDS = 3  # different ones, from which on a sequence is more than numbers, signs and placeholders

_WORD = re.compile(
    r"[^\W\d_]{2,}|[\u3040-\u30ff\u3400-\u9fff]"
)  # of two letters or more; or a Chinese character or kana


class LoopGuard:
    """Receives the tokens of a text one after the other. decode: token ids -> text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._recent = np.full(LONGEST, -1, np.int64)  # the last tokens, the newest first
        self._equal = np.zeros(LONGEST, np.int64)  # [p - 1]: how many of the last tokens equal those p before them

    def push(self, token: int) -> bool:
        """Add a token; return whether the text loops."""
        self._equal = np.where(self._recent == token, self._equal + 1, 0)
        periods = np.arange(1, LONGEST + 1)
        loops = np.flatnonzero(self._equal + periods >= np.maximum(TOKENS, TIMES * periods))
        self._recent = np.concatenate(([token], self._recent[:-1]))
        if not len(loops):
            return False
        period = int(periods[loops[0]])  # the shortest; the others are its multiples
        words = {word.casefold() for word in _WORD.findall(self._decode(self._recent[:period][::-1].tolist()))}
        return len(words) >= WORDS or int(self._equal[period - 1]) + period >= PLAIN_TOKENS
