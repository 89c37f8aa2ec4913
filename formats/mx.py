"""MXFP4: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats v1.0, sections 5.3 and 6.3).

    weight = 2^(s - 127) * E2M1[code]       E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 of a code is the sign

s is E8M0, one byte, which makes 4.25 bits per weight. A number is rounded to the nearest value, ties to the value whose
last bit is 0; magnitudes above 6 become 6. The standard's scale is 2^(floor(log2 max|w|) - 2), which clips weights
above 6 scales; `fit` doubles it in blocks where that lowers the squared error. Weights that are already MXFP4 are
reproduced exactly.

In a checkpoint, codes are stored two per byte, low nibble first, as in transformers' gpt-oss folders; scales are uint8.

On a device, ONNX Runtime has no CPU product for such weights (MatMulBnb4's fp4 is bitsandbytes', whose smallest value
is 1/192 of the largest, not 1/12; DequantizeLinear of float4e2m1 needs opset 23). But 2 E2M1 is an integer from -12 to
12. So the file holds codes and scales as above, and two Gathers, which ONNX Runtime folds once, at load, convert them
to the 8-bit codes and the scales 2^(s - 128) of a com.microsoft.MatMulNBits in blocks of 32. It rounds its input to
int8, with one scale per block. Speed and memory are those of int8_g32 weights, with a file half the size: multiplying
one token by 4096 x 4096 weights on one thread takes 1.14 ms (int8_g32 1.09, nf4 23).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..io.errors import DiffbitError
from ..models.graph import Builder, Value
from .base import Blocks, Format, QTensor, by_group, divisor, finite, nbits
from .rounding import Rounding

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of E8M0
NAN = 255  # in E8M0
GRAMMAR = "mxfp4"


@dataclass(frozen=True)
class E2M1Format(Format):
    """Blocks of `group_size` E2M1 numbers that share a scale of one byte."""

    scale_dtype = torch.uint8
    activations = ("int8",)
    whole_groups = in_blocks = True

    @property
    def byte_scales(self) -> Tensor:
        """Return the scale of each byte, fp32 [256]; that of a byte without meaning is NaN or infinite."""
        raise NotImplementedError

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        return by_group(self, weight, self._fit_groups), None

    def _fit_groups(self, groups: Tensor) -> Tensor:
        """Return scales [n, G] for groups [n, G, group_size]."""
        raise NotImplementedError

    @property
    def spacing(self) -> float:
        return 2 * VALUES[-1] / 14  # 15 different values, because -0 is 0

    def bounds(self, zero: Tensor | None) -> tuple[float, float]:
        return -VALUES[-1], VALUES[-1]

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        place = (weight / divisor(scale)).clamp_(-VALUES[-1], VALUES[-1])
        magnitude = place.abs()
        codes = torch.zeros_like(place, dtype=torch.uint8)
        for index, (low, high) in enumerate(pairwise(VALUES)):
            middle = (low + high) / 2
            codes += magnitude >= middle if index % 2 else magnitude > middle  # ties go to the even code
        return torch.where((place < 0) & (codes > 0), codes + 8, codes)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return _table(codes.device)[codes.int()] * scale

    def device_rounding(self, rounding: Rounding | None) -> Rounding:
        return Rounding(block=self.group_size)

    def blocks(self, weight: QTensor, rounds: bool = False) -> Blocks:
        """Return 8-bit blocks: 2 E2M1 is an integer from -12 to 12."""
        integers = (128 + 2 * _table(weight.codes.device)).to(torch.uint8)
        return Blocks(8, self.group_size, integers[weight.codes.int()], weight.scale / 2)

    def onnx(self, g: Builder, x: Value, weight: QTensor, factor: float, rounding: Rounding | None) -> Value:
        (rows, columns), size = weight.shape, self.group_size
        used = (weight.scale.unique().double() / 2 * factor).numpy()  # of half E2M1's integers
        with np.errstate(over="ignore", under="ignore"):
            there = used.astype(g.dtype)
        if not np.isfinite(there).all() or (there[used != 0] == 0).any():
            raise DiffbitError(
                f"{self} scales from {weight.scale.min():.3g} to {weight.scale.max():.3g} do not fit in "
                f"{np.dtype(g.dtype)}; export with --dtype fp32"
            )
        pairs = (128 + 2 * _table()).to(torch.uint8)  # the 8-bit code of each 4-bit code
        pairs = torch.cartesian_prod(pairs, pairs).flip(1)  # those of the low and the high nibble of each byte
        codes = g.initializer("codes", weight.packed().view(rows, -1, size // 2).numpy())
        wide = g.op("Gather", [g.const(pairs.numpy(), np.uint8), g.cast(codes, np.int32)])  # [N, G, size / 2, 2]
        wide = g.op("Reshape", [wide, g.const([rows, -1, size])])
        scale = self._device_scale(g, weight, factor / 2)
        return nbits(g, x, wide, scale, None, K=columns, N=rows, bits=8, block_size=size)

    def _device_scale(self, g: Builder, weight: QTensor, factor: float) -> Value:
        """Add nodes for the scales times a factor, [N, G] in the graph's dtype, from their bytes."""
        table, dtype = self.byte_scales.double().numpy(), np.float32 if self.tensor_scaled else g.dtype
        with np.errstate(over="ignore"):
            table = (table if self.tensor_scaled else table * factor).astype(dtype)
        stored = g.initializer("scale", self.write_scale(weight.relative_scale()).numpy())
        scale = g.op("Gather", [g.const(np.where(np.isfinite(table), table, 0), dtype), g.cast(stored, np.int32)])
        if not self.tensor_scaled:
            return scale
        tensor_scale = g.initializer("tensor_scale", (weight.whole_scale() * factor).float().numpy())
        return g.cast(g.op("Mul", [scale, tensor_scale]), g.dtype)


@dataclass(frozen=True)
class MXFormat(E2M1Format):
    """Blocks of 32 E2M1 numbers that share an E8M0 scale."""

    factors = (0.5, 2.0)

    @property
    def byte_scales(self) -> Tensor:
        return _power(torch.arange(256) - BIAS)

    def _fit_groups(self, groups: Tensor) -> Tensor:
        largest = finite(groups.abs().amax(-1))
        _, exponent = torch.frexp(largest)  # largest in [2^(exponent-1), 2^exponent)
        scale = _power(exponent - 3).masked_fill(largest == 0, 1.0)
        wide = _power(exponent - 2)

        def loss(scale: Tensor) -> Tensor:
            back = self.decode_each(self.encode_each(groups, scale[..., None], None), scale[..., None], None)
            return ((back - groups) / scale[..., None]).square().sum(-1) * (scale / wide).square()  # no overflow

        return torch.where(loss(wide) < loss(scale), wide, scale)

    def stored(self, scale: Tensor) -> Tensor:
        """Round scales to the nearest powers of two, from 2^-127 to 2^127."""
        mantissa, exponent = torch.frexp(finite(scale))  # mantissa in [0.5, 1)
        return _power(exponent - 1 + (mantissa > 0.75).int())

    def write_scale(self, scale: Tensor) -> Tensor:
        return (torch.frexp(scale)[1] - 1 + BIAS).to(torch.uint8)

    def read_scale(self, stored: Tensor) -> Tensor:
        if stored.dtype != torch.uint8:
            raise DiffbitError(f"{self} weights have {stored.dtype} scales, wanted uint8 (E8M0)")
        if (stored == NAN).any():
            raise DiffbitError(f"{self} weights have a scale of 255, which is NaN in E8M0; the file is damaged")
        return _power(stored.int() - BIAS)


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent as fp32, for exponents in E8M0's range."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent.clamp(-BIAS, NAN - 1 - BIAS))


def _table(device: torch.device | None = None) -> Tensor:
    """Return the 16 values, indexed by code."""
    values = torch.tensor(VALUES, device=device)
    return torch.cat((values, -values))


FORMAT = MXFormat("mxfp4", 4, 32, True)


def parse(name: str) -> MXFormat | None:
    return FORMAT if name == FORMAT.name else None


def names() -> list[str]:
    return [FORMAT.name]
