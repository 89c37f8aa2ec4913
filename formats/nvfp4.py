"""NVFP4: 4-bit floats in blocks of 16 with an 8-bit float each, and one float32 scale for the weight.

    weight = tensor_scale * E4M3[s] * E2M1[code]        E4M3: 0, 2^-9 ... 448

This is "nvfp4-pack-quantized" of compressed-tensors, whose weight_global_scale is 1 / tensor_scale, and NVFP4 of
NVIDIA's ModelOpt, whose weight_scale_2 is tensor_scale: 4.5 bits per weight. Their tensor_scale puts the weight's
largest block scale at 448. Here it is the power of two that puts it at 224 to 448. So a block's scale is its float with
3 bits behind the point, whatever the other blocks are, and methods may round the rows of a weight one after the other.
Only a scale below 2^-14 of the weight's largest has fewer bits. Weights with another tensor_scale keep it.

A number is rounded as in mxfp4 (mx.py); `fit` divides a block's largest number by 6. On a device it is, like mxfp4, a
com.microsoft.MatMulNBits of 8 bits, in blocks of 16, whose codes and scales ONNX Runtime makes at load of those in the
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..io.errors import DiffbitError
from .base import finite
from .mx import VALUES, E2M1Format

E4M3 = torch.float8_e4m3fn
LARGEST, SMALLEST = 448.0, 2.0**-9  # numbers of E4M3
GRAMMAR = "nvfp4"


@dataclass(frozen=True)
class NVFormat(E2M1Format):
    """Blocks of 16 E2M1 numbers that share an E4M3 scale, relative to a scale of the whole weight."""

    tensor_scaled = True
    factors = tuple(x / 100 for x in range(150, 30, -4))  # 1.5: the largest number becomes 4

    @property
    def byte_scales(self) -> Tensor:
        return torch.arange(256, dtype=torch.uint8).view(E4M3).float()

    def _fit_groups(self, groups: Tensor) -> Tensor:
        return finite(groups.abs().amax(-1)) / VALUES[-1]

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.stored(super().fit(weight)[0]), None

    def few_candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield scales that are `stored` already: their steps are as coarse as those of a search."""
        scale, _ = self.fit(weight)
        for factor in self.factors[::2]:
            yield self.stored(scale * factor), None

    def tensor_scale(self, scale: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(scale.max() / LARGEST)  # mantissa in [0.5, 1), or 0
        exponent = (exponent - (mantissa <= 0.5).int()).clamp(-126, 127)
        return torch.ldexp(torch.ones(1, 1, device=scale.device), exponent)

    def stored(self, scale: Tensor) -> Tensor:
        tensor_scale = self.tensor_scale(finite(scale))
        relative = (scale / tensor_scale).clamp(max=LARGEST)
        return torch.where(scale > 0, relative.clamp(min=SMALLEST).to(E4M3).float(), 0) * tensor_scale

    def write_scale(self, scale: Tensor) -> Tensor:
        return scale.to(E4M3).view(torch.uint8)

    def read_scale(self, stored: Tensor) -> Tensor:
        if stored.dtype != torch.uint8:
            raise DiffbitError(f"{self} weights have {stored.dtype} scales, wanted uint8 (E4M3)")
        if (stored > 126).any():  # 127 is NaN, larger bytes have a sign
            raise DiffbitError(
                f"{self} weights have a scale whose byte is {int(stored.max())}, wanted 126 at most: a positive number "
                "in E4M3; the file is damaged"
            )
        return stored.view(E4M3).float()


FORMAT = NVFormat("nvfp4", 4, 16, True)


def parse(name: str) -> NVFormat | None:
    return FORMAT if name == FORMAT.name else None


def names() -> list[str]:
    return [FORMAT.name]
