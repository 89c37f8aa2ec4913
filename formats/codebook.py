"""Codebook formats: absmax * codebook[code], with a codebook whose values lie between -1 and 1.

    nf4     absmax * NF4[code]      4 bits, blocks of 64 (QLoRA, arXiv 2305.14314)
    fp4     absmax * FP4[code]      sign and 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3 or 1; two codes are zero

Codes, absmax and storage equal bitsandbytes': two codes per byte, high nibble first, fp32 scales. On a device they are
com.microsoft.MatMulBnb4, which reads the same bytes and does not round its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..models.graph import Builder, Value
from .base import MICROSOFT, Format, QTensor, by_group, chosen, finite
from .packing import pack_bits, swap_pairs, unpack_bits
from .rounding import Rounding

GRAMMAR = "nf4, fp4"
BINS = 4096  # of the numbers from -1 to 1 that `values_each` distinguishes

# Quantiles of N(0, 1) with an exact zero, scaled to [-1, 1]: bit for bit bitsandbytes' table.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

FP4 = tuple(sign * x / 192 for sign in (1.0, -1.0) for x in (0, 1, 128, 192, 64, 96, 32, 48))  # bitsandbytes' table
TABLES = {"fp4": FP4, "nf4": NF4}  # in the order of MatMulBnb4's quant_type


@dataclass(frozen=True)
class CodebookFormat(Format):
    """absmax * codebook[code], with 16 values."""

    scale_dtype = torch.float32
    whole_groups = True

    @property
    def codebook(self) -> tuple[float, ...]:
        return TABLES[self.name]

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        return finite(by_group(self, weight, lambda group: group.abs().amax(-1))), None

    @property
    def spacing(self) -> float:
        return 2 / (self.codes - 1)

    def bounds(self, zero: Tensor | None) -> tuple[float, float]:
        return -1, 1

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        first = {value: code for code, value in reversed(list(enumerate(self.codebook)))}  # 0 and -0 are one value
        table = torch.tensor(sorted(first), device=weight.device)
        middles = (table[:-1] + table[1:]) / 2
        # multiplies by the reciprocal, as bitsandbytes does: dividing could resolve a tie differently
        place = (weight * (1.0 / scale.clamp(min=1e-38))).clamp_(-1, 1)
        codes = torch.zeros_like(place, dtype=torch.uint8)
        for middle in middles:  # twice as fast as torch.bucketize
            codes += place > middle
        return torch.tensor([first[value] for value in sorted(first)], dtype=torch.uint8, device=weight.device)[
            codes.int()
        ]

    def values_each(self, place: Tensor, zero: Tensor | None) -> Tensor:
        bins = place.clamp(-1, 1).add_(1).mul_(BINS // 2).round_().int()
        return chosen(_values(self.codebook, place.device), bins)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return chosen(torch.tensor(self.codebook, device=codes.device), codes.int()) * scale

    def pack(self, codes: Tensor) -> Tensor:
        return pack_bits(swap_pairs(codes), self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        return swap_pairs(unpack_bits(packed, self.bits, columns))

    def device_nbytes(self, shape: tuple[int, int], width: int) -> int:
        return shape[0] * (shape[1] // 2 + self.groups(shape[1]) * width)

    def onnx(self, g: Builder, x: Value, weight: QTensor, factor: float, rounding: Rounding | None) -> Value:
        codes = g.initializer("codes", weight.packed().flatten().numpy())
        return g.op(
            "MatMulBnb4",
            [x, codes, g.weight("absmax", (weight.scale * factor).flatten().numpy())],
            domain=MICROSOFT,
            K=weight.shape[1],
            N=weight.shape[0],
            block_size=self.group_size,
            quant_type=list(TABLES).index(self.name),
        )


@cache
def _values(codebook: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the nearest value to each of BINS + 1 numbers from -1 to 1."""
    values = torch.tensor(codebook, device=device).unique()  # sorted
    numbers = torch.linspace(-1, 1, BINS + 1, device=device)
    return values[torch.bucketize(numbers, (values[1:] + values[:-1]) / 2)]


def parse(name: str) -> CodebookFormat | None:
    return CodebookFormat(name, 4, 64, True) if name in TABLES else None


def names() -> list[str]:
    return list(TABLES)
