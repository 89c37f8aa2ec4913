"""Integers, and tables of levels, whose group scales have 8 bits: the most accuracy for the bytes.

    int5_g32_s8    row_scale * step / 128 * (code - 2^(b-1))       2 to 6 bits
    nl4_g32_s8     row_scale * step / 128 * LEVELS[code]           2 to 4 bits

A row has one scale in fp16, and a group of 32, 64 or 128 weights a step in -127 ... 127: nl4_g32_s8 takes 4.25 bits a
weight and 2 bytes a row, where int4_g32 takes 4.5. The largest step of a row is 127 or -127, so a row's scale follows
from its group scales. The division by 128, which is exact, keeps it away from fp16's smallest numbers.

Weights are denser near 0 than at the ends of their group, and so are the levels of the tables, which are not symmetric:
a group has the sign of scale that suits it. They are the levels of least squared error for normally distributed weights
in groups of 32, each with its best scale of either sign, found by k-means (Lloyd, 1982), in steps of 1/127 of the
largest. At 4 bits the error is 19 % less than that of the 16 integers, at 3 bits 12 %, at 2 bits 13 %. With weights of
heavy tails (Student's t with 4 degrees of freedom) it is 34 and 24 % less, and at 2 bits 2 % more.

A checkpoint stores the scales of a row as int8: the two bytes of its fp16 scale, then a step for each group. On a
device they are diffbit.LowBitMatMul (ops/lowbit_matmul.py), with the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..io.errors import DiffbitError
from ..ops import int4_matmul
from .base import divisor, finite
from .integer import IntFormat
from .levels import Levels

STEPS = 127
LEVELS = {
    2: (-127, -44, 18, 90),
    3: (-127, -81, -48, -22, 3, 28, 56, 94),
    4: (-127, -98, -78, -63, -48, -36, -23, -11, 1, 12, 24, 37, 50, 65, 83, 105),
}
GRAMMAR = "int2 ... int6 and nl2, nl3, nl4, each with _g32_s8, _g64_s8 or _g128_s8"


@dataclass(frozen=True)
class LowBitFormat(IntFormat):
    """Integers with a scale of 8 bits a group."""

    scale_dtype = torch.int8
    learned = False
    row_nbytes = 2
    scale_unit = 1 / 128

    def stored(self, scale: Tensor) -> Tensor:
        """Round scales [n, G] to steps of each row's scale."""
        scale = finite(scale)
        largest = scale.abs().amax(1, keepdim=True)
        row = super().stored(largest / STEPS / self.scale_unit) * self.scale_unit
        step = (scale / divisor(row)).round_().clamp_(-STEPS, STEPS)
        step = torch.where(scale.abs() == largest, STEPS, step.abs().clamp_(min=1))  # a scale of 0 is that of zeros
        return torch.where(scale == 0, 0, torch.copysign(step * row, scale))

    def scale_parts(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps int8 [n, G] and row scales fp16 [n, 1] of scales fp32, rounded by `stored`."""
        row = (scale.abs().amax(1, keepdim=True) / STEPS / self.scale_unit).half()
        return (scale / divisor(row.float() * self.scale_unit)).round_().to(torch.int8), row

    def write_scale(self, scale: Tensor) -> Tensor:
        step, row = self.scale_parts(scale)
        return torch.cat((row.view(torch.int8), step), 1)

    def read_scale(self, stored: Tensor) -> Tensor:
        if stored.dtype != torch.int8:
            raise DiffbitError(f"{self} weights have {stored.dtype} scales, wanted int8")
        row = stored[:, :2].flatten().view(torch.float16).float()[:, None]
        if not row.isfinite().all():
            raise DiffbitError(f"{self} weights have a row whose scale is not finite; the file is damaged")
        return row * self.scale_unit * stored[:, 2:].float()

    def nbytes(self, shape: tuple[int, int]) -> int:
        return super().nbytes(shape) + self.row_nbytes * shape[0]


@dataclass(frozen=True)
class LevelFormat(Levels, LowBitFormat):
    """Levels of a table with a scale of 8 bits a group."""

    @property
    def levels(self) -> tuple[int, ...]:
        return LEVELS[self.bits]


def parse(name: str) -> LowBitFormat | None:
    match = re.fullmatch(r"(int|nl)(\d{1,9})_g(\d{1,9})_s8", name)
    if match is None:
        return None
    kind, bits, group_size = match[1], int(match[2]), int(match[3])
    most_bits = 6 if kind == "int" else max(LEVELS)
    if not 2 <= bits <= most_bits:
        raise DiffbitError(f"format {name!r} has {bits} bits, wanted 2 to {most_bits}")
    if group_size not in int4_matmul.GROUP_SIZES:
        sizes = ", ".join(map(str, int4_matmul.GROUP_SIZES))
        raise DiffbitError(f"format {name!r} has groups of {group_size}, wanted one of {sizes}")
    return (LowBitFormat if kind == "int" else LevelFormat)(name, bits, group_size, True)


def names() -> list[str]:
    return [
        f"{kind}{bits}_g{size}_s8"
        for kind, most_bits in (("int", 6), ("nl", max(LEVELS)))
        for bits in range(2, most_bits + 1)
        for size in int4_matmul.GROUP_SIZES
    ]
