"""Binary weights: scale * (2 code - 1), scale = mean |w| of each 64 (XNOR-Net, arXiv 1603.05279, eq. 6).

A device multiplies them as 2-bit integers: codes 1 and 3 less the zero point, 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..io.errors import DiffbitError
from ..models.graph import Builder, Value
from .base import Format, QTensor, by_group, finite, nbits
from .packing import pack_bits
from .rounding import Rounding

GRAMMAR = "binary_g64"


@dataclass(frozen=True)
class BinaryFormat(Format):
    scale_dtype = torch.float32
    activations = ("int8",)
    device_bits = 2

    def check(self, shape: tuple[int, ...]) -> None:
        super().check(shape)
        if shape[1] % self.group_size:
            raise DiffbitError(f"a weight of shape {shape} cannot be {self}: in_features must be a multiple of 64")

    def fit(self, weight: Tensor) -> tuple[Tensor, None]:
        self.check(tuple(weight.shape))
        return finite(by_group(self, weight, lambda group: group.abs().mean(-1))), None

    def bounds(self, zero: Tensor | None) -> tuple[float, float]:
        return -1, 1

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return (weight > 0).expand(torch.broadcast_shapes(weight.shape, scale.shape))

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return (2 * codes.float() - 1) * scale

    def device_nbytes(self, shape: tuple[int, int], width: int) -> int:
        return shape[0] * (shape[1] // 4 + self.groups(shape[1]) * width)

    def device_rounding(self, rounding: Rounding | None) -> Rounding:
        return Rounding(block=self.group_size)  # of MatMulNBits: int8, a scale for each group

    def onnx(self, g: Builder, x: Value, weight: QTensor, factor: float, rounding: Rounding | None) -> Value:
        rows, columns = weight.shape
        codes = g.initializer("codes", pack_bits(2 * weight.codes + 1, 2).view(rows, -1, self.group_size // 4).numpy())
        scale = g.weight("scale", (weight.scale * factor).numpy())
        return nbits(g, x, codes, scale, None, K=columns, N=rows, bits=2, block_size=self.group_size)


def parse(name: str) -> BinaryFormat | None:
    return BinaryFormat(name, 1, 64, True) if name == GRAMMAR else None


def names() -> list[str]:
    return [GRAMMAR]
