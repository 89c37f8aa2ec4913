"""Number formats as values: what a weight may be rounded to, and how that lies in bytes.

    name           codes             weight
    int4_g32       0 ... 2^b - 1     scale * (code - 2^(b-1))        one scale per 32 weights of a row
    int4_g32_asym  0 ... 2^b - 1     scale * (code - zero)           and one zero point
    int8           0 ... 255         scale * (code - 128)            one scale per row (output channel)
    nf4            0 ... 15          absmax * NF4[code]              blocks of 64 (QLoRA, arXiv 2305.14314)
    ternary        0, 1, 2           scale * (code - 1)              one scale per tensor (b1.58, arXiv 2402.17764)

Integers come in 2 to 8 bits, with groups of 16 to 256 weights or one per row. Symmetric ones use the whole range, as
ggml's Q4_0 does: the weight of largest magnitude is code 0 exactly, scale = w / -2^(b-1) carrying its sign; a weight of
nearly that size and the other sign is clipped by up to one step.

Scales of integers are rounded to fp16 BEFORE the codes are chosen, so that a file that keeps fp16 scales dequantizes
to the very same numbers. A group of zeros has scale 0; a scale below fp16's smallest number becomes that number.

A format is one of the three small classes below. `fit` finds scales, `encode` rounds to codes with given scales (the
methods that choose codes with care, such as GPTQ, use both), `decode` is its inverse, `pack` and `unpack` are the file.
N is out_features, K in_features, G the groups in a row; the last group of a row may be short.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DiffbitError
from ..ops import ternary_matmul
from .packing import pack_bits, pack_nibbles, row_bytes, unpack_bits, unpack_nibbles

GROUP_SIZES = (16, 32, 64, 128, 256)
# Weights handled at a time. Float copies stay in cache, and torch runs operations on fewer than 2^15 numbers on the
# calling thread: where others are at work too, its threads' barriers made quantizing ten times slower (1.1 billion
# weights on 2 cores: 80 s in blocks of 2^19, 9 s so); on idle cores they would gain a third.
BLOCK = (1 << 15) - 1
HALF_TINY = 2.0**-24  # the smallest positive fp16

# Quantiles of N(0, 1) with an exact zero, scaled to [-1, 1]: bitsandbytes' table, to the last bit.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format(ABC):
    """What every format has. kind: int, codebook or ternary; group_size 0: one scale per row (ternary: tensor)."""

    name: str
    bits: int
    group_size: int
    symmetric: bool
    kind: ClassVar[str]
    scale_dtype: ClassVar[torch.dtype]  # of the scales in a file

    def __str__(self) -> str:
        return self.name

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse a weight whose shape the format cannot hold."""
        if len(shape) != 2 or 0 in shape:
            raise DiffbitError(f"a weight of shape {tuple(shape)} cannot be {self}: wanted [out_features, in_features]")

    def groups(self, columns: int) -> int:
        """G, the scales in a row of `columns` weights."""
        return -(-columns // self.group_size) if self.group_size else 1

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], self.groups(shape[1])

    @abstractmethod
    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the packed codes of a weight [N, K]."""

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Bytes of a weight [N, K] in a file: codes, scales and zero points."""
        (rows, size), (scale_rows, groups) = self.packed_shape(shape), self.scale_shape(shape)
        zero = 0 if self.symmetric else rows * row_bytes(groups, self.bits)
        return rows * size + scale_rows * groups * self.scale_dtype.itemsize + zero

    @abstractmethod
    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales fp32 [N, G] (ternary [1, 1]) and zero points uint8 [N, G] (or None) for a weight [N, K]."""

    def stored(self, scale: Tensor) -> Tensor:
        """Scales fp32 as a file gives them back."""
        return _to_half(scale) if self.scale_dtype == torch.float16 else scale

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest codes, uint8 [N, K], of a weight [N, K] under given scales and zero points."""
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        for rows in row_blocks(weight):
            step = scale.expand(len(weight), -1)[rows, :, None]  # [n, G, 1]
            nearest = self.encode_each(self._grouped(weight[rows].float()), step, _rows(zero, rows))
            codes[rows] = nearest.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
        return codes

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that codes stand for, computed in fp32."""
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for rows in row_blocks(codes):
            step = scale.expand(len(codes), -1)[rows, :, None]
            value = self.decode_each(self._grouped(codes[rows]), step, _rows(zero, rows))
            weight[rows] = value.flatten(1)[:, : codes.shape[1]].to(dtype)
        return weight

    def _grouped(self, values: Tensor) -> Tensor:
        """[n, K] -> [n, G, group]; zeros fill a short last group, which moves no scale, and are cut off again."""
        if not self.group_size:
            return values[:, None]
        return F.pad(values, (0, -values.shape[1] % self.group_size)).unflatten(1, (-1, self.group_size))

    @abstractmethod
    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Nearest codes, of any dtype, element by element: weight, scale and zero broadcast against each other."""

    @abstractmethod
    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The inverse of `encode_each`, fp32."""

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """uint8 [N, K] -> uint8 of `packed_shape`."""

    @abstractmethod
    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""


@dataclass(frozen=True)
class IntFormat(Format):
    """Integers of 2 to 8 bits. Packed: a little-endian bit stream per row, packing.py."""

    kind = "int"
    scale_dtype = torch.float16

    @classmethod
    def of(cls, bits: int, group_size: int = 0, symmetric: bool = True) -> IntFormat:
        group = f"_g{group_size}" if group_size else ""
        return cls(f"int{bits}{group}{'' if symmetric else '_asym'}", bits, group_size, symmetric)

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        bounds = [torch.aminmax(self._grouped(weight[rows].float()), dim=-1) for rows in row_blocks(weight)]
        low, high = (torch.cat(parts) for parts in zip(*bounds, strict=True))  # [N, G]
        if self.symmetric:
            largest = torch.where(-low >= high, low, high)  # with its sign; the negative one of two equals
            return _to_half(largest / -(2 ** (self.bits - 1))), None
        low, high = low.clamp(max=0), high.clamp(min=0)  # zero stays exact
        scale = _to_half(high / (2**self.bits - 1) - low / (2**self.bits - 1))  # halves: no overflow of high - low
        return scale, (-low / _divisor(scale)).round().clamp(0, 2**self.bits - 1).to(torch.uint8)

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        offset = 2 ** (self.bits - 1) if zero is None else zero
        return (weight / _divisor(scale)).round_().add_(offset).clamp_(0, 2**self.bits - 1)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        offset = 2 ** (self.bits - 1) if zero is None else zero.float()
        return codes.float().sub(offset).mul_(scale)  # codes may be float, and are the caller's

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], row_bytes(shape[1], self.bits)

    def pack(self, codes: Tensor) -> Tensor:
        return pack_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        return unpack_bits(packed, self.bits, columns)


@dataclass(frozen=True)
class CodebookFormat(Format):
    """absmax * codebook[code], the codebook rising from -1 to 1; 4 bits. nf4's codes and absmax are bitsandbytes' own.

    Packed: two codes a byte, high nibble first, as in bitsandbytes. Scales stay fp32, as there.
    """

    codebook: tuple[float, ...]
    kind = "codebook"
    scale_dtype = torch.float32

    def check(self, shape: tuple[int, ...]) -> None:
        super().check(shape)
        if shape[1] % self.group_size:
            raise DiffbitError(
                f"a weight of shape {tuple(shape)} cannot be {self}: in_features must be a multiple of "
                f"{self.group_size}; use int4_g32 or int4_g64, which take any width"
            )

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        return _finite(torch.cat([self._grouped(weight[r].float()).abs().amax(-1) for r in row_blocks(weight)])), None

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        table = torch.tensor(self.codebook, device=weight.device)
        middles = (table[:-1] + table[1:]) / 2
        # times the reciprocal, not divided: that is bitsandbytes' arithmetic, and a tie may hang on it
        place = (weight * (1.0 / scale.clamp(min=1e-38))).clamp_(-1, 1)
        codes = torch.zeros_like(place, dtype=torch.uint8)
        for middle in middles:  # twice as fast as torch.bucketize
            codes += place > middle
        return codes

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return torch.tensor(self.codebook, device=codes.device)[codes.int()] * scale

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], shape[1] // 2

    def pack(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        return unpack_nibbles(packed)[:, :columns]


@dataclass(frozen=True)
class TernaryFormat(Format):
    """s * {-1, 0, 1} with s = max(mean|W|, 1e-5) of the whole tensor: absmean (arXiv 2402.17764, eq. 1-3).

    Packed in the layout of the op TernaryMatMul (ops/ternary_matmul.py): 128 weights in 32 bytes.
    """

    kind = "ternary"
    scale_dtype = torch.float32

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, 1

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        total = sum(weight[rows].float().abs().sum(dtype=torch.float64) for rows in row_blocks(weight))
        mean = torch.as_tensor(total / weight.numel(), dtype=torch.float32, device=weight.device)
        return _finite(mean.clamp(min=1e-5).view(1, 1)), None

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return (weight / scale).round_().clamp_(-1, 1).add_(1)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return codes.float().sub(1).mul_(scale)

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], -(-shape[1] // ternary_matmul.BLOCK) * ternary_matmul.BLOCK_BYTES

    def pack(self, codes: Tensor) -> Tensor:
        return ternary_matmul.pack(codes.to(torch.int8) - 1)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        return (ternary_matmul.unpack(packed, columns) + 1).to(torch.uint8)


NAMED = {
    "nf4": CodebookFormat("nf4", 4, 64, True, NF4),
    "ternary": TernaryFormat("ternary", 2, 0, True),
}
GRAMMAR = "int2 ... int8, each with _g16, _g32, _g64, _g128 or _g256 and with _asym if wanted; nf4; ternary"


def parse_format(name: str) -> Format:
    """The format of a name such as "int4_g32", "int3_g64_asym", "int8", "nf4" or "ternary"."""
    if name in NAMED:
        return NAMED[name]
    match = re.fullmatch(r"int(\d+)(?:_g(\d+))?(_asym)?", name)
    if match is None:
        raise DiffbitError(f"{name!r} is no number format; wanted one of: {GRAMMAR}")
    bits, group_size = int(match[1]), int(match[2] or 0)
    if not 2 <= bits <= 8:
        raise DiffbitError(f"format {name!r} has {bits} bits, wanted 2 to 8")
    if match[2] and group_size not in GROUP_SIZES:
        raise DiffbitError(
            f"format {name!r} has groups of {group_size}, wanted one of {', '.join(map(str, GROUP_SIZES))}, or no _g "
            "for one scale per row"
        )
    return IntFormat.of(bits, group_size, match[3] is None)


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows of about BLOCK elements each."""
    count = max(1, BLOCK // weight.shape[1])
    for start in range(0, len(weight), count):
        yield slice(start, min(start + count, len(weight)))


def _rows(zero: Tensor | None, rows: slice) -> Tensor | None:
    return None if zero is None else zero[rows, :, None]


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by: a group of zeros, scale 0, becomes zeros again."""
    return scale.masked_fill(scale == 0, torch.inf)


def _to_half(scale: Tensor) -> Tensor:
    """fp32 numbers rounded to fp16 ones; too large is an error, too small (but not 0) becomes fp16's smallest."""
    half = _finite(scale).half().float()
    if half.isinf().any():
        raise DiffbitError(
            f"a scale of {scale.abs().max().item():.3g} does not fit in fp16, whose largest number is 65504: the "
            "weight holds extreme values; keep this layer in float (NAME=none)"
        )
    return torch.where((half == 0) & (scale != 0), torch.copysign(torch.full_like(scale, HALF_TINY), scale), half)


def _finite(scale: Tensor) -> Tensor:
    if not scale.isfinite().all():
        raise DiffbitError("the weight holds NaN or infinity, which no format can; the checkpoint is damaged")
    return scale
