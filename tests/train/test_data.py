from __future__ import annotations

import numpy as np
import pytest

from diffbit.errors import DiffbitError
from diffbit.train.data import Rows


@pytest.mark.parametrize("count", [20, 21, 27, 100])
def test_an_epoch_predicts_every_token_once_but_for_the_ends(count: int) -> None:
    length = 8
    rows = Rows(np.arange(count), length, seed=5)
    ends = set()
    for epoch in range(6):
        taken = rows.take(epoch * rows.per_epoch, rows.per_epoch)
        assert taken.shape == (rows.per_epoch, length + 1)
        assert (np.diff(taken) == 1).all()  # stretches of the stream
        predicted = np.sort(taken[:, 1:].ravel())
        assert (np.diff(predicted) == 1).all()  # all of one stretch, none twice
        assert count - predicted.size < 2 * length
        ends.add(int(predicted[0]))
    assert len(ends) > 1  # the tokens left out change


def test_rows_are_a_function_of_their_number() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 1000)
    whole = Rows(tokens, 10, seed=1).take(0, 300)  # three epochs and a bit
    other = Rows(tokens, 10, seed=1)
    for first, count in ((250, 50), (0, 7), (99, 3), (7, 93)):  # in any order, across epochs
        assert (other.take(first, count) == whole[first : first + count]).all()
    assert not (Rows(tokens, 10, seed=2).take(0, 99) == whole[:99]).all()
    assert not (whole[:99] == whole[99:198]).all()  # another order in the next epoch


def test_too_little_text() -> None:
    assert Rows(np.arange(20), 10, seed=0).per_epoch == 1
    with pytest.raises(DiffbitError, match="19 tokens, but rows of 10 need 20"):
        Rows(np.arange(19), 10, seed=0)
