"""Texts in a loop are found, and texts that only repeat themselves as good texts do are not."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from diffbit.runtime.loops import LONGEST, PLAIN_TOKENS, TIMES, TOKENS, LoopGuard

PIECE = re.compile(r"[\u3040-\u9fff]|\s?\w+|\n|\s+|[^\w\s]")


class Pieces:
    """A tokenizer of words, single digits and signs, as those of many models."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        pieces = [part for piece in PIECE.findall(text) for part in (piece if piece.isdigit() else [piece])]
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        texts = list(self.ids)
        return "".join(texts[id] for id in ids)


def looped_after(text: str) -> int | None:
    """The number of tokens after which the guard ends a text; None: it does not."""
    tokenizer = Pieces()
    ids, guard = tokenizer.encode(text), LoopGuard(tokenizer.decode)
    return next((count for count, token in enumerate(ids, 1) if guard.push(token)), None)


def slow(ids: Sequence[int], words: int) -> bool:
    """The definition, word by word."""
    for period in range(1, LONGEST + 1):
        least = max(TOKENS if words >= 3 else PLAIN_TOKENS, TIMES * period)
        if len(ids) >= least and ids[-1] == ids[-1 - period] and ids[period - least :] == ids[-least:-period]:
            return True
    return False


@pytest.mark.parametrize(
    "text",
    [
        "The sun is a star. " * 100,
        "I am a helpful assistant, and I can help you with that.\n" * 60,
        "def f(x):\n    return f(x)\n\n" * 60,
        "1. Paris is the capital of France.\n" * 60,
        "私は学生です。" * 60,
        "ha " * 500,
        "\n" * 500,
        "0, " * 500,
        "Once upon a time there was a king. He lived far away. " + "He had a son and a daughter. " * 60,
        " ".join(f"word{i}" for i in range(80)) * 7,  # a long paragraph, again and again
    ],
)
def test_loops_are_found(text: str) -> None:
    assert looped_after(text) is not None


def rows(form: str, count: int) -> str:
    return "".join(form.format(i=i) for i in range(count))


@pytest.mark.parametrize(
    "text",
    [
        ", ".join(map(str, range(1000))),
        "1" + "0" * 100,  # a googol
        "[" + "0, " * 100 + "]",
        ("[" + ", ".join(["0"] * 10) + "],\n") * 10,  # a matrix of zeros
        ("[" + ", ".join(["False"] * 8) + "],\n") * 8,
        "| name | age |\n" + "|---|---|\n" + "| | |\n" * 40,  # an empty table
        "| day | task |\n" + rows("| {i} | to be done |\n", 60),
        rows("| {i} | - | - | - |\n", 60),
        "I will not talk in class.\n" * 20,  # a punishment
        "<tr>\n  <td>name</td>\n  <td>age</td>\n</tr>\n" * 6,
        rows("    total += values[{i}]\n", 60),
        rows("    assert f({i}) == {i}\n", 60),
        "        if x:\n            return y\n        else:\n            return z\n" * 3,
        "=" * 120 + "\ntitle\n" + "=" * 120,
        "-" * 80 + "\n" + " " * 120,
        "na " * 60 + "hey Jude",
        "we all live in a yellow submarine, yellow submarine, yellow submarine\n" * 4,
        rows("Question {i}: what is the answer to question {i}?\nAnswer: it is the answer to question {i}.\n", 40),
        "A" * 128 + "==",  # base64 of zeros
        "nop\n" * 64,
    ],
)
def test_good_texts_are_not_ended(text: str) -> None:
    assert looped_after(text) is None


def test_loops_are_those_of_the_definition() -> None:
    """Beside the slow definition, on texts of random periods with random errors."""
    draw = random.Random(0)
    ends = set()
    for case in range(24):
        words = case % 2 * 3
        period = draw.choice([1, 2, 3, 7, 31, 64, 95, 96, 97])
        unit = [draw.randrange(1000) for _ in range(period)]
        ids = [draw.randrange(1000) for _ in range(draw.randrange(20))]
        ids += unit * (draw.choice([200, 390, 420]) // period + 1)
        for _ in range(draw.choice([0, 0, 1, 2])):
            ids[draw.randrange(len(ids))] = 1000
        guard = LoopGuard(lambda _, words=words: "one two three" if words else "0 0")
        end = next((count for count, id in enumerate(ids, 1) if guard.push(id)), None)
        expected = next((count for count in range(1, len(ids) + 1) if slow(ids[:count], words)), None)
        assert end == expected
        ends.add(end)
    assert None in ends and len(ends) > 5
