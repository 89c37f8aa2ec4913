"""One and two bits on the grids that models are trained for: a few values, equally far apart or on both sides of zero.

    bin_g128         scale * (2 code - 1)          -1 and 1
    ternary_g128     scale * (code - 1)            -1, 0 and 1
    balanced2_g128   scale * (2 code - 3)          -3, -1, 1 and 3: the levels of SEQ (ParetoQ, arXiv 2502.02631)

A group of 32, 64 or 128 weights has a scale in fp16, so these take 1.125 and 2.125 bits a weight in groups of 128. A
model has to be trained for them; published ones are Bonsai and Ternary-Bonsai, HY-1.8B-2Bit and ParetoQ's. int2 has the
grid -2, -1, 0 and 1, of either sign.

The fitted scale of -1 and 1 is the mean of the magnitudes, which has the least squared error (XNOR-Net, arXiv
1603.05279). Weights that lie on a grid get their own scale, also if they were rounded to float16 or bfloat16. On a
device these formats are diffbit.LowBitMatMul (ops/lowbit_matmul.py): ternary codes as integers of 2 bits, the others
with a table of levels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..io.errors import DiffbitError
from ..ops import int4_matmul
from .base import by_group, divisor
from .integer import IntFormat
from .levels import Levels

LEVELS = {"bin": (-1, 1), "ternary": (-1, 0, 1), "balanced2": (-3, -1, 1, 3)}
ROUNDING = 2**-8  # largest relative error of a number in bfloat16
GRAMMAR = "bin, ternary and balanced2, each with _g32, _g64 or _g128"


@dataclass(frozen=True)
class GridFormat(Levels, IntFormat):
    """A few levels with an fp16 scale a group."""

    trained = True

    @property
    def levels(self) -> tuple[int, ...]:
        return LEVELS[self.name.partition("_")[0]]

    def warning(self) -> str:
        return (
            f"rounding to {self} destroys a model that was not trained with such weights; train it first "
            f"(diffbit train --init MODEL --qat {self}), or use int4_g128"
        )

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        if len(self.levels) > 2:
            return self.stored(by_group(self, weight, self._fit_range)), None
        sums = by_group(self, weight, lambda group: group.abs().sum(-1, dtype=torch.float64))
        counts = by_group(self, torch.ones_like(weight[:1]), lambda group: group.sum(-1))
        return self.stored((sums / counts).float()), None

    def _fit_range(self, group: Tensor) -> Tensor:
        """Return the scale of each group [n, G, group] that puts its largest weight on the outermost level. Of weights
        that lie on the grid but for their rounding to 16 bits, it is the scale of the smallest weight, because level 1
        needs no rounding and level 3 does."""
        sizes = group.abs()
        least = sizes.masked_fill(sizes == 0, torch.inf).amin(-1)
        least = least.masked_fill(least.isinf(), 0)
        values = self.values_each(group / divisor(least)[..., None], None) * least[..., None]
        on_grid = ((values - group).abs() <= ROUNDING * sizes).logical_or_(sizes == 0).all(-1)  # 0: padding
        return torch.where(on_grid, least, sizes.amax(-1) / self.levels[-1])


def parse(name: str) -> GridFormat | None:
    match = re.fullmatch(r"(bin|ternary|balanced2)_g(\d{1,9})", name)
    if match is None:
        return None
    group_size = int(match[2])
    if group_size not in int4_matmul.GROUP_SIZES:
        sizes = ", ".join(map(str, int4_matmul.GROUP_SIZES))
        raise DiffbitError(f"format {name!r} has groups of {group_size}, wanted one of {sizes}")
    return GridFormat(name, (len(LEVELS[match[1]]) - 1).bit_length(), group_size, True)


def names() -> list[str]:
    return [f"{kind}_g{size}" for kind in LEVELS for size in int4_matmul.GROUP_SIZES]
