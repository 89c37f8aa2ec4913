"""The multiple-choice knapsack: one choice in each row, the least loss in all, within so many bytes. Exact.

A table over bytes (Dudzinski and Walukiewicz 1987, section 5): with best[u] the least loss of the rows so far within u
units of bytes above the smallest there is,

    best'[u] = min over the choices j of the next row of   best[u - units_j] + loss_j

The unit is the largest number that divides all differences of bytes: sizes of weights share large factors, so the table
is short (a model of 1.1 billion weights: about 10^5 units). Where it would exceed STEPS, the unit is larger and bytes
are rounded up: what is chosen still fits, and `gap`, from the same table with bytes rounded down, bounds how much less
loss there could be. The table answers for every budget at once, so the whole curve of loss against bytes comes with it.

Losses may be of any sign and need not fall as bytes grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

STEPS = 1 << 18  # units in a table, about


class Knapsack:
    """sizes[i][j] and losses[i][j]: bytes and loss of choice j in row i; rows may differ in length, to 256."""

    def __init__(self, sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], steps: int = STEPS) -> None:
        self.losses = losses
        self.smallest = sum(min(row) for row in sizes)
        self.largest = sum(max(row) for row in sizes)
        above = [[size - min(row) for size in row] for row in sizes]
        shared = gcd(*(size for row in above for size in row)) or 1
        self.unit = max(shared, -(-(self.largest - self.smallest) // steps))
        self._units = [[-(-size // self.unit) for size in row] for row in above]
        self._best, self._picks = self._table(self._units)
        self._bound = self._best
        if self.unit != shared:
            self._bound, _ = self._table([[size // self.unit for size in row] for row in above])

    def _table(self, units: list[list[int]]) -> tuple[NDArray[np.float64], list[NDArray[np.uint8]]]:
        """best [U + 1] of all rows, falling; and for each row the choice at each number of units."""
        length = 1 + sum(max(row) for row in self._units)
        best = np.zeros(length)
        picks = []
        for row, losses in zip(units, self.losses, strict=True):
            after = np.full(length, np.inf)
            pick = np.zeros(length, np.uint8)
            for choice, (cost, loss) in enumerate(zip(row, losses, strict=True)):
                total = best[: length - cost] + loss
                better = total < after[cost:]
                after[cost:][better] = total[better]
                pick[cost:][better] = choice
            best = after
            picks.append(pick)
        return best, picks

    def choose(self, budget: int) -> tuple[int, ...]:
        """The choice in each row, of least loss in sum within `budget` bytes; of equal ones, one of the fewest bytes.

        The budget must be `smallest` or more.
        """
        place = int(np.argmin(self._best[: self._room(budget)]))
        choices = []
        for row, pick in zip(reversed(self._units), reversed(self._picks), strict=True):
            choices.append(int(pick[place]))
            place -= row[choices[-1]]
        return tuple(reversed(choices))

    def gap(self, budget: int) -> float:
        """No choice within `budget` bytes loses less than `choose`'s by more than this; 0 where bytes are exact."""
        last = self._room(budget) - 1
        return float(self._best[last] - self._bound[last])

    def curve(self) -> list[tuple[int, float]]:
        """(bytes, least loss) wherever more bytes lose less, from `smallest` on."""
        falls = np.flatnonzero(np.diff(self._best, prepend=np.inf) < 0)
        return [(self.smallest + int(place) * self.unit, float(self._best[place])) for place in falls]

    def _room(self, budget: int) -> int:
        """Entries of the table that are within a budget."""
        assert budget >= self.smallest
        return min((budget - self.smallest) // self.unit + 1, len(self._best))
