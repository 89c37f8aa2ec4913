"""Statistics of a stream of numbers, none of which is kept; they can be merged with those of another stream.

- The 100 largest |x| are exact: those of a union are among the 100 largest of its parts.
- The moments are merged in float64 (Pébay's pairwise update, Sandia report SAND2008-6212): exact but for rounding.
- The median of |x| comes from a histogram over the bit patterns of fp32 magnitudes, which grow with the magnitude. Nine
  bits of the fraction are kept, so that a bin is at most 2^-9 of its lower edge wide and the bin's middle is within
  2^-10 < 0.1 % of the true median, whatever the range. Below 2^-126, the smallest normal number, the median is 0.

Counts, largest values, histogram and place merge to the same result in any order and grouping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...io.errors import DiffbitError

RANKS = (1, 2, 3, 10, 100)  # of the largest values, as in Table 5 of arXiv 2410.05258
FRACTION_BITS = 9  # bits of fp32's 23-bit fraction that determine a number's bin
MEDIAN_ERROR = 2.0 ** -(FRACTION_BITS + 1)  # relative
_SHIFT = 23 - FRACTION_BITS
_BINS = 255 << FRACTION_BITS  # every finite fp32 magnitude has one
_CHUNK = 1 << 22  # numbers that are turned into float64 at a time


@dataclass(frozen=True, order=True)
class Location:
    """Where a value is: window, token in it, channel (hidden states) or sub-head (logits), key token."""

    window: int
    position: int
    unit: int
    key: int | None = None  # attention logits only: the key's token


@dataclass(frozen=True)
class Summary:
    """Statistics of numbers x."""

    count: int
    top: dict[str, float | None]  # {rank: the rank-th largest |x|} for RANKS; None if there are fewer numbers
    median: float  # of |x|, within MEDIAN_ERROR of the true one
    ratio: float | None  # largest / median
    mean: float
    std: float
    kurtosis: float | None  # E[(x-mean)^4] / E[(x-mean)^2]^2; None if all numbers are equal
    layer: int | None  # of the largest |x|
    place: Location  # of the largest |x|; the first in reading order where several are equal

    @property
    def max(self) -> float:
        assert self.top["1"] is not None
        return self.top["1"]


class Statistics:
    """Accumulates statistics (see the module's docstring) in about 1 MB, however many numbers are added."""

    def __init__(self, what: str = "numbers") -> None:
        self.what = what  # for errors
        self.count = 0
        self.mean = self.m2 = self.m3 = self.m4 = 0.0  # central moments, not divided by the count
        self.top = torch.empty(0)  # fp32, falling, at most RANKS[-1]
        self.histogram = torch.zeros(_BINS, dtype=torch.int64)
        self.place: Location | None = None

    def update(self, values: Tensor, place: Callable[[int], Location]) -> None:
        """Add numbers [n] of any float dtype; `place(i)` is the position of number i, and increases with i."""
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK].float()
            magnitude, part = chunk.abs(), Statistics()
            part.count = len(chunk)
            part.top = magnitude.topk(min(RANKS[-1], part.count)).values.cpu()
            if not part.top[0].isfinite():
                raise DiffbitError(
                    f"{self.what}: the activations hold NaN or infinity; the model is damaged, or its dtype too narrow "
                    "for it"
                )
            part.place = place(start + int((magnitude == magnitude.max()).nonzero()[0]))
            part.histogram = torch.bincount(magnitude.view(torch.int32) >> _SHIFT, minlength=_BINS).cpu()
            exact = chunk.double()
            part.mean = exact.mean().item()
            exact = exact - part.mean
            square = exact.square()
            part.m2, part.m3, part.m4 = (power.sum().item() for power in (square, square * exact, square.square()))
            self.merge(part)

    def merge(self, other: Statistics) -> None:
        """Add the numbers of `other`."""
        if not other.count:
            return
        n, m = self.count, other.count
        if not n or other.top[0] > self.top[0]:
            self.place = other.place
        elif other.top[0] == self.top[0]:
            assert self.place is not None and other.place is not None
            self.place = min(self.place, other.place)
        self.top = torch.cat((self.top, other.top)).sort(descending=True).values[: RANKS[-1]]
        self.histogram += other.histogram

        total, delta = n + m, other.mean - self.mean
        a2, a3, b2, b3 = self.m2, self.m3, other.m2, other.m3
        self.m4 += other.m4 + delta**4 * (n * m * (n * n - n * m + m * m) / total**3)
        self.m4 += 6 * delta**2 * (n * n * b2 + m * m * a2) / total**2 + 4 * delta * (n * b3 - m * a3) / total
        self.m3 += b3 + delta**3 * (n * m * (n - m) / total**2) + 3 * delta * (n * b2 - m * a2) / total
        self.m2 += b2 + delta**2 * (n * m / total)
        self.mean += delta * m / total
        self.count = total

    def summary(self) -> Summary:
        if not self.count or self.place is None:
            raise DiffbitError("there is nothing to measure: the windows contain no token; give more text")
        largest, median, variance = self.top.tolist(), self.median(), self.m2 / self.count
        return Summary(
            count=self.count,
            top={str(rank): largest[rank - 1] if rank <= len(largest) else None for rank in RANKS},
            median=median,
            ratio=largest[0] / median if median else None,
            mean=self.mean,
            std=math.sqrt(variance),
            kurtosis=self.m4 / self.count / variance**2 if variance else None,
            layer=None,
            place=self.place,
        )

    def median(self) -> float:
        """Return the median of |x|, within MEDIAN_ERROR; for an even count the mean of the middle two, as in numpy."""
        middle = torch.tensor([(self.count - 1) // 2, self.count // 2])
        bins = torch.searchsorted(self.histogram.cumsum(0), middle, right=True)
        bits = (bins << _SHIFT) + (1 << (_SHIFT - 1))  # the fraction's middle is the bin's middle
        values = torch.where(bins < 1 << FRACTION_BITS, 0.0, bits.int().view(torch.float32))
        return values.double().mean().item()
