from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diffbit.apps.train.data import TrainingRows
from diffbit.calib_data import VALUE, Needles, load_tokenizer
from diffbit.io.errors import DiffbitError


@pytest.mark.parametrize("count", [20, 21, 27, 100])
def test_an_epoch_predicts_every_token_once_but_for_the_ends(count: int) -> None:
    length = 8
    rows = TrainingRows(np.arange(count), length, seed=5)
    ends = set()
    for epoch in range(6):
        taken, answers = rows.take(epoch * rows.per_epoch, rows.per_epoch)
        assert not answers.any()
        assert taken.shape == (rows.per_epoch, length + 1)
        assert (np.diff(taken) == 1).all()  # stretches of the stream
        predicted = np.sort(taken[:, 1:].ravel())
        assert (np.diff(predicted) == 1).all()  # all of one stretch, none twice
        assert count - predicted.size < 2 * length
        ends.add(int(predicted[0]))
    assert len(ends) > 1  # the tokens left out change


def test_rows_are_a_function_of_their_number() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 1000)
    whole, _ = TrainingRows(tokens, 10, seed=1).take(0, 300)  # three epochs and a bit
    other = TrainingRows(tokens, 10, seed=1)
    for first, count in ((250, 50), (0, 7), (99, 3), (7, 93)):  # in any order, across epochs
        assert (other.take(first, count)[0] == whole[first : first + count]).all()
    assert not (TrainingRows(tokens, 10, seed=2).take(0, 99)[0] == whole[:99]).all()
    assert not (whole[:99] == whole[99:198]).all()  # another order in the next epoch


def test_needle_rows_are_a_function_of_their_number(trained: Callable[[str], Path]) -> None:
    needles = Needles.of(load_tokenizer(trained("diff_v1")))
    tokens = np.random.default_rng(0).integers(600, 700, 5000)
    plain, _ = TrainingRows(tokens, 60, seed=1).take(0, 300)
    rows, answers = TrainingRows(tokens, 60, 1, needles, 0.5).take(0, 300)
    laid = answers.any(axis=1)
    assert 110 < laid.sum() < 190
    assert (rows[~laid] == plain[~laid]).all()
    assert set(answers.sum(axis=1)) == {0, VALUE, 2 * VALUE}  # of 7 tokens each, with its query, two fill half a row
    assert np.isin(rows[answers], needles.words).all()
    for row, where in zip(rows[laid], answers[laid], strict=True):
        for start in np.flatnonzero(where)[::VALUE]:
            asked = row[start - 4 : start + VALUE]
            stretches = np.lib.stride_tricks.sliding_window_view(row, len(asked))
            assert (stretches == asked).all(axis=1).sum() == 2  # the needle, and the query with its answer
    other = TrainingRows(tokens, 60, 1, needles, 0.5)
    for first, count in ((250, 50), (0, 7), (83, 93)):
        for part, whole in zip(other.take(first, count), (rows, answers), strict=True):
            assert (part == whole[first : first + count]).all()
    assert not (TrainingRows(tokens, 60, 2, needles, 0.5).take(0, 9)[0] == rows[:9]).all()
    with pytest.raises(DiffbitError, match="1 needles and 1 queries take 14 tokens, more than half of 20"):
        TrainingRows(tokens, 20, 1, needles, 0.5)


def test_too_little_text() -> None:
    assert TrainingRows(np.arange(20), 10, seed=0).per_epoch == 1
    with pytest.raises(DiffbitError, match="19 tokens, but rows of 10 need 20"):
        TrainingRows(np.arange(19), 10, seed=0)
