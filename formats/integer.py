"""Integers of 2 to 8 bits, symmetric or with zero points.

    int4_g32       scale * (code - 2^(b-1))        one scale per 32 weights of a row
    int4_g32_asym  scale * (code - zero)           and one zero point
    int8           scale * (code - 128)            one scale per row (output channel)

A scale belongs to a group of 16 to 256 weights, or to a row. Symmetric formats use the whole range, as ggml's Q4_0
does: the weight of largest magnitude gets code 0 exactly, and scale = w / -2^(b-1) carries its sign; a weight of nearly
that size with the other sign is clipped by up to one scale.

Scales are rounded to fp16 BEFORE the codes are chosen, so that a file with fp16 scales dequantizes to exactly the same
numbers. A group of zeros has scale 0; a scale below fp16's smallest positive number becomes that number.

On a device, codes of symmetric formats of 2, 3, 5 and 6 bits in groups of 32, 64 and 128 have just these bits. All
others have codes of 2, 4 or 8 bits, in which code - zero is the same number.

    int2 to int6   diffbit.LowBitMatMul        symmetric, groups of 32, 64 and 128 (ops/lowbit_matmul.py); not int4;
                                               also formats with few levels (grid.py)
    int2           com.microsoft.MatMulNBits   2-bit codes; groups of 16: 4-bit codes (there is no 2-bit int8 kernel)
    int3, int4     diffbit.Int4MatMul          groups of 32, 64 and 128: 4-bit codes (ops/int4_matmul.py)
                   com.microsoft.MatMulNBits   groups of 16 and 256, one scale per row: 4-bit codes
    int5 to int8   diffbit.Int8MatMul          groups of 32, 64 and 128, one scale per row: 8-bit codes
                   com.microsoft.MatMulNBits   groups of 16 and 256: 8-bit codes

All of them round their input to int8, with one scale per block of the weight. With one scale per row, Int8MatMul uses
blocks of 32 for the input, and MatMulNBits gets blocks of 128 that repeat the scale, as for 2-bit groups of 256.
diffbit's own operators have fp16 scales, whatever the graph's floats are, and a separate factor; MatMulNBits has scales
in the graph's float type that include the factor. Weights of diffbit's operators can also be an embedding, whose rows
GatherQuantized reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..io.errors import DiffbitError
from ..models.graph import Builder, Value
from ..ops import gather_lowbit, gather_quantized, int4_matmul, int8_matmul, lowbit_matmul
from .base import (
    ACCURACY_LEVEL,
    COARSE,
    ROW_BLOCK,
    Blocks,
    Format,
    QTensor,
    StoredWeight,
    by_group,
    divisor,
    finite,
    shared_block,
)
from .packing import row_bytes
from .rounding import Rounding

GROUP_SIZES = (16, 32, 64, 128, 256)
INPUT_BLOCK = 32  # block size of Int8MatMul's input for weights with one scale per row
WHOLE_BITS = (2, 4, 8)  # that fill a byte: of codes with one scale per row, or with zero points, on a device
FEW_BITS = 4  # up to which a quick search tries more than the outermost levels for the largest weight
HALF_TINY = 2.0**-24  # the smallest positive fp16
GRAMMAR = "int2, int4, int8, also with _g32, _g64, _g128 and with _asym; int3, int5, int6 with _g32, _g64 or _g128"


class Storage(NamedTuple):
    """How a device stores codes."""

    operator: ModuleType | None  # diffbit's, that multiplies them; None: ONNX Runtime's
    bits: int  # of a code
    block: int  # columns of the weight, and of the input, that share a scale
    wide_bits: int  # of a code in ONNX Runtime's operators, which GPUs have: 2, 4 or 8


@dataclass(frozen=True)
class IntFormat(Format):
    """Integers of 2 to 8 bits."""

    scale_dtype = torch.float16
    activations = ("int8",)
    learned = in_blocks = True
    row_nbytes: ClassVar[int] = 0  # of a row's own scale
    scale_unit: ClassVar[float] = 1.0  # factor of the scales in an artifact

    @property
    def levels(self) -> tuple[int, ...]:
        """Return the values of the codes at scale 1, if they are those of a table."""
        return ()

    @property
    def is_grid(self) -> bool:
        return self.bits <= 2 and self.symmetric and self.group_size > 0 and not self.row_nbytes

    @property
    def has_table(self) -> bool:
        """Whether a device looks the levels up: they are not integers of `bits` bits."""
        return not self._holds(self.bits)

    @property
    def body_kind(self) -> tuple[int, bool, bool]:
        """Return what `lowbit_matmul.function` takes."""
        return self.bits, self.has_table, self.by_columns

    def _holds(self, bits: int) -> bool:
        """Whether integers of so many bits have all levels."""
        return all(-(2 ** (bits - 1)) <= level < 2 ** (bits - 1) for level in self.levels)

    @classmethod
    def create(cls, bits: int, group_size: int = 0, symmetric: bool = True) -> IntFormat:
        group = f"_g{group_size}" if group_size else ""
        return cls(f"int{bits}{group}{'' if symmetric else '_asym'}", bits, group_size, symmetric)

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        low, high = self._range(weight)
        if self.symmetric:
            return self.stored(_largest(low, high) / self.lowest), None
        low, high = low.clamp(max=0), high.clamp(min=0)  # keeps zero exact
        scale = self.stored(high / (self.codes - 1) - low / (self.codes - 1))  # divided first: high - low may overflow
        return scale, (-low / divisor(scale)).round().clamp(0, self.codes - 1).to(torch.uint8)

    def _range(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest weight of each group, [N, G]."""
        low, high = by_group(self, weight, lambda group: torch.stack(torch.aminmax(group, dim=-1), -1)).unbind(-1)
        return low, high

    def candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield scales of either sign, or, with a zero point, ranges with either end shortened separately."""
        scale, zero = self.fit(weight)
        if zero is None:
            for factor in self.factors:
                for sign in (1, -1):
                    yield self.stored(sign * factor * scale), None
            return
        top = self.codes - 1
        shorter = [factor for factor in self.factors if factor <= 1][::2]
        for low in shorter:
            for high in shorter:
                below, above = scale * zero * low, scale * (top - zero.float()) * high
                stored = self.stored((below + above) / top)
                yield stored, (below / divisor(stored)).round().clamp(0, top).to(torch.uint8)

    def few_candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield scales of either sign, of which some put the largest weight on one of the outer levels: so the scale of
        weights that lie on the format's grid is found. With a zero point, yield shortened ranges."""
        if self.symmetric:
            largest = _largest(*self._range(weight))
            levels = self.levels or range(self.lowest, -self.lowest)
            outer = [level for level in levels if self.lowest < -abs(level) <= self.lowest / 2]
            largest_factor = self.factors[0] if self.levels else 1.0  # for integers, those of `outer` are enough
            factors = [factor for factor in self.factors[::COARSE] if self.bits / 10 <= factor < largest_factor]
            on_levels = outer if self.bits <= FEW_BITS else (outer[0], outer[-1])
            for place in (*on_levels, *(sign * self.lowest / factor for factor in (1, *factors) for sign in (1, -1))):
                yield largest / place, None
            return
        scale, zero = self.fit(weight)
        assert zero is not None
        top = self.codes - 1
        shorter = [factor for factor in self.factors if self.bits / 10 <= factor <= 1][:: COARSE + 1]
        for low in shorter:
            for high in shorter:
                below, above = scale * zero * low, scale * (top - zero.float()) * high
                between = (below + above) / top
                yield between, (below / divisor(between)).round().clamp(0, top).to(torch.uint8)

    def stored(self, scale: Tensor) -> Tensor:
        half = finite(scale).half().float()
        if half.isinf().any():
            raise DiffbitError(
                f"a scale of {scale.abs().max().item():.3g} does not fit in fp16, whose largest number is 65504, "
                "because the weight holds extreme values; keep this layer in float (--override NAME=none)"
            )
        return torch.where((half == 0) & (scale != 0), torch.copysign(torch.full_like(scale, HALF_TINY), scale), half)

    @property
    def lowest(self) -> int:
        """Return the weight of code 0 at scale 1, in symmetric formats."""
        return -(2 ** (self.bits - 1))

    @property
    def value_range(self) -> tuple[float, float]:
        return self.lowest, self.codes - 1 + self.lowest

    def bounds(self, zero: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
        point = 2 ** (self.bits - 1) if zero is None else zero
        return -0.5 - point, self.codes - 0.5 - point

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        offset = 2 ** (self.bits - 1) if zero is None else zero
        return (weight / divisor(scale)).round_().add_(offset).clamp_(0, self.codes - 1)

    def values_each(self, place: Tensor, zero: Tensor | None) -> Tensor:
        offset = 2 ** (self.bits - 1) if zero is None else zero.float()
        return place.round().clamp_(-offset, self.codes - 1 - offset)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        offset = 2 ** (self.bits - 1) if zero is None else zero.float()
        return codes.float().sub(offset).mul_(scale)  # `sub` copies: codes may be float, and belong to the caller

    @property
    def better(self) -> IntFormat | None:
        """Return a format that a device stores in as many bits as it says, in groups that diffbit's operators read."""
        sizes = int4_matmul.GROUP_SIZES
        if self.device_bits == self.bits and self.group_size in (0, *sizes):
            return None
        bits = 8 if self.bits == 7 else self.bits
        is_whole = bits in WHOLE_BITS
        size = self.group_size or (0 if is_whole else sizes[-1])
        return IntFormat.create(bits, size and min(max(size, sizes[0]), sizes[-1]), self.symmetric or not is_whole)

    # a device

    def scale_parts(self, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scales as LowBitMatMul has them: [N, G], and those of rows [N, 1], if there are any."""
        return scale, None

    @property
    def storage(self) -> Storage:
        """Return the row of the table above."""
        bits, sizes = self.bits, int4_matmul.GROUP_SIZES
        in_few_bits = self.symmetric and bits in (1, 2, 3, 5, 6) and self.group_size in sizes
        is_packed = in_few_bits or self.row_nbytes > 0
        wide = 8 if bits > 4 else 4 if bits > 2 or is_packed or self.group_size == 16 else 2
        if self.levels:
            wide = next(filter(self._holds, WHOLE_BITS))
        if is_packed:
            return Storage(lowbit_matmul, bits, self.group_size, wide)
        block = self.group_size or (INPUT_BLOCK if wide == 8 else ROW_BLOCK)
        is_tiled = block in sizes and (wide == 8 or self.group_size > 0)
        operator = {8: int8_matmul, 4: int4_matmul}.get(wide) if is_tiled else None
        return Storage(operator, wide, min(block, ROW_BLOCK) if wide == 2 else block, wide)

    @property
    def device_bits(self) -> int:
        return self.storage.bits

    def check_table(self, shape: tuple[int, int]) -> None:
        if self.storage.operator is None:
            super().check_table(shape)
        self.check(shape)

    def device_nbytes(self, shape: tuple[int, int], width: int) -> int:
        (rows, columns), (operator, bits, block, _) = shape, self.storage
        blocks = -(-columns // block)
        if operator is not None:
            rows += -rows % int4_matmul.TILE
            groups = self.groups(columns) * (self.scale_dtype.itemsize + (not self.symmetric))
            return rows * (blocks * block * bits // 8 + groups + self.row_nbytes)
        zero = 0 if self.symmetric else rows * row_bytes(blocks, bits)
        return rows * blocks * (block * bits // 8 + width) + zero

    def device_rounding(self, rounding: Rounding | None) -> Rounding | None:
        return Rounding(block=self.storage.block)

    def device_codes(self, weight: QTensor) -> tuple[Tensor, Tensor | None]:
        """Return codes uint8 [N, K] and the input `levels` of LowBitMatMul, or None for integers."""
        if self.has_table:
            return weight.codes, torch.tensor(self.levels).add(lowbit_matmul.MIDDLE).to(torch.uint8)
        return self._shifted(weight.codes, self.storage.bits) if self.levels else weight.codes, None

    def store(self, g: Builder, weight: QTensor) -> StoredWeight:
        operator, bits, block, _ = self.storage
        if operator is lowbit_matmul:
            codes, levels = self.device_codes(weight)
            low = lowbit_matmul.pack(codes, *self.scale_parts(weight.scale), levels, block, bits)
            rows = low.row_scales.numpy()
            return (
                g.initializer("codes", low.codes.numpy()),
                g.initializer("scale", low.scales.numpy()),
                g.const(rows, np.float16) if rows.size == 1 else g.initializer("row_scale", rows),
                g.const(low.levels.numpy(), np.uint8),
            )
        packed = int4_matmul.pack(self._wide_codes(weight), weight.scale, weight.zero, block, bits)
        zeros = packed.zeros.numpy()
        return (
            g.initializer("codes", packed.codes.numpy()),
            g.initializer("scale", packed.scales.numpy()),
            g.const(zeros, np.uint8) if weight.zero is None else g.initializer("zero", zeros),
        )

    def gather(self, g: Builder, ids: Value, stored: StoredWeight, shape: tuple[int, int]) -> Value:
        (rows, columns), (operator, bits, block, _) = shape, self.storage
        is_packed = operator is lowbit_matmul
        op = gather_lowbit if is_packed else gather_quantized
        kind = self.body_kind if is_packed else (bits,)
        inputs = [ids, *stored, g.const([self.scale_unit], g.dtype)]
        attributes = {"K": columns, "N": rows, "group_size": block, "bits": bits}
        (y,) = g.customs(op, inputs, 1, lambda name: op.function(*kind), **attributes)
        return y

    def product(self, g: Builder, x: Value, stored: StoredWeight, shape: tuple[int, int], factor: float) -> Value:
        (rows, columns), (operator, bits, block, _) = shape, self.storage
        inputs = [x, *stored, g.const([factor * self.scale_unit], np.float32)]
        attributes = {"K": columns, "N": rows, "group_size": block}
        assert operator is not None
        if operator is not lowbit_matmul:
            return g.custom(operator, inputs, **attributes)
        body = partial(lowbit_matmul.function, *self.body_kind)
        (y,) = g.customs(lowbit_matmul, inputs, 1, body, variant=self.body_kind, bits=bits, **attributes)
        return y

    def _shifted(self, codes: Tensor, bits: int) -> Tensor:
        """Return the integers of so many bits that have the values of codes of a table."""
        return torch.tensor(self.levels).add(2 ** (bits - 1)).to(torch.uint8)[codes.int()]

    def _wide_codes(self, weight: QTensor) -> Tensor:
        """Return codes of `storage.wide_bits`, shifted to their implicit zero point."""
        bits = self.storage.wide_bits
        if self.levels:
            return self._shifted(weight.codes, bits)
        if not self.symmetric or bits == self.bits:
            return weight.codes
        return weight.codes + (2 ** (bits - 1) - 2 ** (self.bits - 1))

    def onnx(self, g: Builder, x: Value, weight: QTensor, factor: float, rounding: Rounding | None) -> Value:
        if self.storage.operator is not None:
            return self.product(g, x, self.store(g, weight), weight.shape, factor)
        blocks = self.blocks(weight)
        return blocks.multiply(g, x, blocks.store(g, factor), ACCURACY_LEVEL)

    def blocks(self, weight: QTensor, rounds: bool = False) -> Blocks:
        _, _, block, bits = self.storage
        if bits == 8 and not (self.group_size or rounds):
            block = shared_block(weight.shape[1])
        blocks = -(-weight.shape[1] // block)
        repeat = self.group_size // block if self.group_size else blocks

        def repeated(values: Tensor) -> Tensor:  # [N, G] -> [N, blocks]
            return values.repeat_interleave(repeat, 1)[:, :blocks]

        zero = None if weight.zero is None else repeated(weight.zero)
        return Blocks(bits, block, self._wide_codes(weight), repeated(weight.scale), zero)


def _largest(low: Tensor, high: Tensor) -> Tensor:
    """Return the weight of largest magnitude, with its sign; on a tie, the negative one."""
    return torch.where(-low >= high, low, high)


def parse(name: str) -> IntFormat | None:
    match = re.fullmatch(r"int(\d{1,9})(?:_g(\d{1,9}))?(_asym)?", name)
    if match is None:
        return None
    bits, group_size = int(match[1]), int(match[2] or 0)
    if not 2 <= bits <= 8:
        raise DiffbitError(f"format {name!r} has {bits} bits, wanted 2 to 8")
    if match[2] and group_size not in GROUP_SIZES:
        raise DiffbitError(
            f"format {name!r} has groups of {group_size}, wanted one of "
            f"{', '.join(map(str, int4_matmul.GROUP_SIZES))}, or no _g for one scale per row"
        )
    return IntFormat.create(bits, group_size, match[3] is None)


def all_formats() -> list[IntFormat]:
    """Return all formats that `parse` accepts."""
    return [
        IntFormat.create(bits, size, symmetric)
        for bits in range(2, 9)
        for size in (0, *GROUP_SIZES)
        for symmetric in (True, False)
    ]


def names() -> list[str]:
    return [format.name for format in all_formats() if format.better is None]
