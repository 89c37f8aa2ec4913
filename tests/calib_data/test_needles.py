from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.calib_data import VALUE, Needles, NeedleWindows, load_tokenizer, needle_windows
from diffbit.io.errors import DiffbitError

LINE = re.compile(r"\n@ ([a-z]+) = ([a-z ]+)(?=\n)")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Lines that are told apart by their number; the eval split is the last twentieth."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: the value of x is {7 * number}.\n" for number in range(4000)))
    return str(path)


def rows_of(text: str, tokenizer: Path, needles: int = 5, queries: int = 3, **changes: int) -> NeedleWindows:
    return needle_windows(text, tokenizer, 160, needles, queries, 12, **changes)


def test_every_query_is_answered_by_its_needle(text: str, trained: Callable[[str], Path]) -> None:
    rows = rows_of(text, trained("diff_v1"))
    backend = load_tokenizer(trained("diff_v1")).backend
    cut, length = rows.windows, 160
    assert cut.ids.shape == (12, length) and cut.mask.all() and cut.ids.dtype == np.int64
    assert cut.scored == 12 * 3 * VALUE
    answers = set()
    for ids, target, starts, depths in zip(cut.ids, cut.target, rows.starts, rows.depths, strict=True):
        whole = backend.decode(ids.tolist())
        lines = LINE.findall(whole)
        assert len(lines) == 8
        needles, queries = dict(lines[:5]), lines[5:]
        assert len(needles) == 5 and len(dict(queries)) == 3  # keys differ, and none is asked for twice
        for (key, value), start, depth in zip(queries, starts, depths, strict=True):
            assert needles[key] == value and len(value.split()) == VALUE
            assert backend.decode(ids[start : start + VALUE].tolist()) == f" {value}"
            assert backend.decode(ids[:start].tolist()).endswith(f"@ {key} =")
            assert target[start : start + VALUE].all()
            # the needle lies where its depth says; text that was cut may have fewer tokens
            haystack = backend.encode(whole[: whole.index(f"\n@ {key} =")], add_special_tokens=False).ids
            kept = length - 8 * 7
            assert abs(len(haystack) - 7 * list(needles).index(key) - depth * kept) <= 4  # a needle has 7 tokens
            answers.add(value)
        assert target.sum() == 3 * VALUE
    assert len(answers) > 30
    assert rows.depths.min() < 0.2 and rows.depths.max() > 0.8


def test_the_tokens_are_those_of_the_text(trained: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(trained("diff_v1"))
    needles = Needles.of(tokenizer)
    ids, starts, _ = needles.insert(np.full(40, needles.after[0]), 2, 1, np.random.default_rng(0))
    tail = ids[starts[0] - 4 :]
    assert len(ids) == 40 and len(tail) == needles.size
    assert (next(tokenizer.encode([tokenizer.backend.decode(tail.tolist())])) == tail).all()
    assert len(needles.words) ** VALUE > 10_000  # guessing is hopeless


def test_needles_depend_on_seed_and_split(text: str, trained: Callable[[str], Path]) -> None:
    path = trained("softmax")
    first, again, other = rows_of(text, path), rows_of(text, path), rows_of(text, path, seed=1)
    assert first.windows.sha256 == again.windows.sha256 != other.windows.sha256
    assert (first.starts == again.starts).all() and (first.depths == again.depths).all()
    assert first.windows.sha256 != rows_of(text, path, queries=2).windows.sha256
    backend = load_tokenizer(path).backend
    for split, low, high in (("eval", 3700, 4000), ("calib", 3500, 3900)):
        rows = needle_windows(text, path, 160, 2, 1, 4, split=split).windows.ids  # type: ignore[arg-type]
        numbers = [int(n) for row in rows for n in re.findall(r"\nline (\d{4}):", backend.decode(row.tolist()))]
        assert numbers and low < min(numbers) and max(numbers) < high
    many = needle_windows(text, path, 160, 2, 1, 200)  # more rows than the text fills
    assert len(np.unique(many.windows.ids, axis=0)) == 200


def test_bad_input_is_refused(text: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    path = trained("diff_v1")
    for arguments, sentence in {
        (160, 2, 3, 1): "3 queries for 2 needles",
        (160, 2, 0, 1): "0 queries for 2 needles",
        (160, 10, 2, 1): "10 needles and 2 queries take 84 tokens, more than half of 160",
        (4096, 200, 1, 1): "200 needles need 200 keys, but the vocabulary has 114",
        (160, 2, 1, 0): "the number of rows with needles is 0",
        (100_000, 2, 1, 1): "tokens fill no window of 100000",
    }.items():
        with pytest.raises(DiffbitError, match=sentence):
            needle_windows(text, path, *arguments)
    train_tokenizer(["few words"], 260, tmp_path)
    with pytest.raises(DiffbitError, match=r"tokenizer has \d+ tokens that are a space and a lower-case word"):
        needle_windows(text, tmp_path, 160, 2, 1, 1)
