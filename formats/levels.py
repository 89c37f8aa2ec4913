"""Rounds to the levels of a table, which are integers at scale 1."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .base import Format, chosen, divisor


class Levels(Format):
    """A format, listed before its other base, whose codes are the indices of `levels`."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Return the values of the codes at scale 1, in order, from -127 to 127."""
        raise NotImplementedError

    @property
    def codes(self) -> int:
        return len(self.levels)

    @property
    def lowest(self) -> int:
        return self.levels[0]

    @property
    def spacing(self) -> float:
        return (self.levels[-1] - self.levels[0]) / (self.codes - 1)

    @property
    def value_range(self) -> tuple[float, float]:
        return self.levels[0], self.levels[-1]

    def bounds(self, zero: Tensor | None) -> tuple[float, float]:
        return self.value_range

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        # the middles between levels are multiples of one half, so the half below a number decides its code
        halves = (weight / divisor(scale)).mul_(2).floor_().clamp_(-256, 255).int() + 256
        halves &= 511  # NaN, which has no nearest level, gets some code
        return chosen(_nearest(self.levels, weight.device), halves)

    def values_each(self, place: Tensor, zero: Tensor | None) -> Tensor:
        halves = (2 * place).floor_().clamp_(-256, 255).add_(256).int()
        return chosen(_nearest_levels(self.levels, place.device), halves)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return chosen(_levels(self.levels, codes.device), codes.int()) * scale


@cache
def _levels(levels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


@cache
def _nearest(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the code of the level nearest to x / 2, for x = -256 ... 255."""
    values = torch.tensor(levels, device=device)
    numbers = torch.arange(-256, 256, device=device)
    return torch.bucketize(numbers, values[:-1] + values[1:], right=True).to(torch.uint8)


@cache
def _nearest_levels(levels: tuple[int, ...], device: torch.device) -> Tensor:
    return _levels(levels, device)[_nearest(levels, device).int()]
