"""`Format`, the base class of number formats, and `QTensor`, a weight in a format.

A format is a frozen value that defines everything about itself: scales (`fit`, `candidates`, `stored`), codes
(`encode`, `decode`), the file (`pack`, `write_scale` and their inverses), the matrix product (`rounding`, `multiply`)
and the device (`device_bits`, `device_nbytes`, `device_rounding`, `onnx`). Code outside never asks which format it is.

N is out_features, K in_features, G the number of groups in a row; the last group of a row may be short.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..io.errors import DiffbitError
from ..models.graph import Builder, Value
from .packing import pack_bits, row_bytes, unpack_bits
from .rounding import INT8, Rounding

# Weights processed at a time. Float copies stay in cache, and torch runs operations on fewer than 2^15 numbers on the
# calling thread. On busy cores, the barriers of torch's threads made quantizing ten times slower (1.1 billion weights
# on 2 cores: 80 s in blocks of 2^19, 9 s in these); on idle cores threads would be a third faster.
BLOCK = (1 << 15) - 1
MICROSOFT = "com.microsoft"
ROW_BLOCK = 128  # block size in MatMulNBits for weights with one scale per row
ACCURACY_LEVEL = 4  # of MatMulNBits: int8 inputs; lower levels are fifty times slower at 2 and 8 bits

COARSE = 3  # of `Format.factors`, a quick search tries one in so many
LARGE = 1 << 26  # a product decodes larger weights some rows at a time


StoredWeight = tuple[Value, ...]  # a weight in a graph: the inputs of the format's operators between x and the factor


class Blocks(NamedTuple):
    """A weight [N, K] as ONNX Runtime's low-bit operators have it: scale * (code - zero), in blocks along its rows.

    bits 2, 4 or 8; size of a block: a power of two, at least 16; codes uint8 [N, K]; scale fp32 [N, blocks]; zero uint8
    [N, blocks], None: 2^(bits - 1).
    """

    bits: int
    size: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def store(self, g: Builder, factor: float = 1.0) -> tuple[Value, Value, Value | None]:
        """Add codes, scales times the factor, and zero points as initializers, in MatMulNBits's layout."""
        (rows, columns), size = self.codes.shape, self.size
        packed = pack_bits(F.pad(self.codes, (0, -columns % size)), self.bits).view(rows, -1, size * self.bits // 8)
        return (
            g.initializer("codes", packed.numpy()),
            g.weight("scale", (self.scale * factor).numpy()),
            None if self.zero is None else g.initializer("zero", pack_bits(self.zero, self.bits).numpy()),
        )

    def multiply(self, g: Builder, x: Value, stored: tuple[Value, Value, Value | None], accuracy_level: int) -> Value:
        """Add a MatMulNBits node for x W^T, W as `store` added it."""
        rows, columns = self.codes.shape
        return nbits(
            g, x, *stored, K=columns, N=rows, bits=self.bits, block_size=self.size, accuracy_level=accuracy_level
        )


@dataclass(frozen=True)
class Format(ABC):
    """group_size 0: one scale per row (where `per_tensor`: one for the whole weight)."""

    name: str
    bits: int  # of a code in a checkpoint
    group_size: int
    symmetric: bool

    scale_dtype: ClassVar[torch.dtype]  # of the scales in a checkpoint
    activations: ClassVar[tuple[str, ...]] = ()  # activation formats that a device supports with such weights
    per_tensor: ClassVar[bool] = False
    tensor_scaled: ClassVar[bool] = False  # a checkpoint has scales relative to one of the weight, `tensor_scale`
    learned: ClassVar[bool] = False  # training learns its scales (LSQ); else they follow from the weights at each step
    factors: ClassVar[tuple[float, ...]] = tuple(x / 100 for x in range(140, 30, -4))  # of scales: see `candidates`
    whole_groups: ClassVar[bool] = False  # in_features must be a multiple of group_size
    trained: ClassVar[bool] = False  # needs training in this format; rounding alone destroys a model
    in_blocks: ClassVar[bool] = False  # integers with a scale a block
    rows_together: ClassVar[int] = 1  # so many rows' codes depend on each other: `encode` and `encode_column` find them
    integer_product: ClassVar[bool] = False  # sums (code - 1) * integer input as integers

    def __str__(self) -> str:
        return self.name

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse a weight whose shape the format cannot hold."""
        if len(shape) != 2 or 0 in shape:
            raise DiffbitError(f"a weight of shape {tuple(shape)} cannot be {self}: wanted [out_features, in_features]")
        if self.whole_groups and shape[1] % self.group_size:
            raise DiffbitError(
                f"a weight of shape {tuple(shape)} cannot be {self}: in_features must be a multiple of "
                f"{self.group_size}; use int4_g32, which takes any width"
            )

    def warning(self) -> str | None:
        """Return a warning for users who choose this format, or None."""
        if self.device_bits == self.bits:
            return None
        return f"{self} has codes of {self.bits} bits, and takes {self.device_bits} bits a code on a device"

    @property
    def is_grid(self) -> bool:
        """Whether models are trained in the few values of this format and stored as floats, which it gives back."""
        return False

    @property
    def better(self) -> Format | None:
        """Return the format to choose in place of this one, which is only read where a published checkpoint has it;
        None: this one can be chosen."""
        return None

    def check_offered(self) -> None:
        """Refuse a format that a user should not choose."""
        if self.better is None:
            return
        reason = f"a device stores its codes of {self.bits} bits in {self.device_bits} bits"
        if self.device_bits == self.bits:
            reason = f"diffbit has no operator for groups of {self.group_size}"
        raise DiffbitError(
            f"{self} is only read from other libraries' checkpoints, because {reason}; use {self.better}"
        )

    def groups(self, columns: int) -> int:
        """Return G, the number of scales in a row of `columns` weights."""
        return -(-columns // self.group_size) if self.group_size else 1

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (1, 1) if self.per_tensor else (shape[0], self.groups(shape[1]))

    # scales

    @abstractmethod
    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scales fp32 [N, G] (per_tensor [1, 1]) and zero points uint8 [N, G] (or None) for a weight [N, K]."""

    def candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield other scales and zero points, shaped as `fit`'s, for a search to try."""
        scale, _ = self.fit(weight)
        for factor in self.factors:
            yield self.stored(scale * factor), None

    def few_candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the scales, not yet `stored`, and zero points that a quick search tries."""
        scale, _ = self.fit(weight)
        for factor in self.factors[::COARSE]:
            yield scale * factor, None

    def stored(self, scale: Tensor) -> Tensor:
        """Round scales, fp32, to the values that a checkpoint can store."""
        return finite(scale)

    def write_scale(self, scale: Tensor) -> Tensor:
        """Convert scales fp32, already rounded by `stored`, to the checkpoint's type."""
        return scale.to(self.scale_dtype)

    def read_scale(self, stored: Tensor) -> Tensor:
        """Invert `write_scale`; scales of other float types are accepted too."""
        return stored.float()

    def tensor_scale(self, scale: Tensor) -> Tensor:
        """Return the scale fp32 [1, 1] that scales fp32 [N, G], rounded by `stored`, are stored relative to: only for
        formats that are `tensor_scaled`."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the tensors of a weight in a checkpoint (`QTensor.parts`)."""
        tensor_scale, zero = ("tensor_scale",) * self.tensor_scaled, ("zero",) * (not self.symmetric)
        return "codes", "scale", *tensor_scale, *zero

    @property
    def stacked(self) -> Format:
        """Return the format of several weights whose rows are concatenated (`QTensor.stack`)."""
        return self

    # codes

    @property
    def codes(self) -> int:
        """Number of codes: they are 0 ... codes - 1."""
        return int(2**self.bits)

    @property
    def spacing(self) -> float:
        """Return the mean distance between neighbouring values at scale 1."""
        return 1.0

    @property
    def value_range(self) -> tuple[float, float]:
        """Return the lowest and the highest value at scale 1, in formats whose scales are `learned`."""
        raise NotImplementedError

    @abstractmethod
    def bounds(self, zero: Tensor | None) -> tuple[Any, Any]:
        """Return the range (low, high) of weights, at scale 1, that is not clipped; floats, or tensors like `zero`."""

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes, uint8 [N, K], of a weight [N, K] for given scales and zero points."""
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        for rows, s, z, (part,) in self.by_rows(scale, zero, weight):
            codes[rows] = self.encode_each(part.float(), s, z).flatten(1)[:, : weight.shape[1]].to(torch.uint8)
        return codes

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> QTensor:
        """Round a weight [N, K] of any float dtype to the nearest codes."""
        return QTensor(self, (weight.shape[0], weight.shape[1]), self.encode(weight, scale, zero), scale, zero)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] of the codes, computed in fp32."""
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for rows, s, z, (part,) in self.by_rows(scale, zero, codes):
            weight[rows] = self.decode_each(part, s, z).flatten(1)[:, : codes.shape[1]].to(dtype)
        return weight

    def by_rows(
        self, scale: Tensor, zero: Tensor | None, *values: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor | None, list[Tensor]]]:
        """Yield (rows, scales and zero points [n, G, 1], each value's rows as [n, G, group]), some rows at a time."""
        scales = scale.expand(len(values[0]), -1)[..., None]
        for rows in row_blocks(values[0]):
            grouped = [self.grouped(value[rows]) for value in values]
            yield rows, scales[rows], None if zero is None else zero[rows, :, None], grouped

    def grouped(self, values: Tensor) -> Tensor:
        """Reshape [n, K] to [n, G, group]; zeros, which change no scale, pad a short last group."""
        if not self.group_size:
            return values[:, None]
        if short := -values.shape[1] % self.group_size:
            values = F.pad(values, (0, short))
        return values.unflatten(1, (-1, self.group_size))

    @abstractmethod
    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes, of any dtype, elementwise; weight, scale and zero broadcast."""

    @abstractmethod
    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Invert `encode_each`; returns fp32."""

    @property
    def by_columns(self) -> bool:
        """Whether codes of a column depend on each other."""
        return self.rows_together > 1

    def encode_column(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the codes, of any dtype, of a whole column [N] of a weight; scale, zero: those of each row."""
        return self.encode_each(weight, scale, zero)

    def values_each(self, place: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest values at scale 1, elementwise, of numbers at scale 1, for a search to compare scales.

        Where two values are about as near, it may be the other one than that of `encode_each`.
        """
        unit = torch.ones((), device=place.device)
        return self.decode_each(self.encode_each(place, unit, zero), unit, zero)

    # a checkpoint

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the packed codes of a weight [N, K]."""
        return shape[0], row_bytes(shape[1], self.bits)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes uint8 [N, K] to uint8 of `packed_shape`: a little-endian bit stream per row (packing.py)."""
        return pack_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`; raises DiffbitError for a code without meaning."""
        return unpack_bits(packed, self.bits, columns)

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a weight [N, K] in a checkpoint: codes, scales and zero points."""
        (rows, size), (scale_rows, groups) = self.packed_shape(shape), self.scale_shape(shape)
        zero = 0 if self.symmetric else rows * row_bytes(groups, self.bits)
        return rows * size + scale_rows * groups * self.scale_dtype.itemsize + 4 * self.tensor_scaled + zero

    # the product

    def rounding(self, module: str, columns: int, activations: str | None) -> Rounding | None:
        """Return how the linear layer `module`, with in_features `columns`, rounds its input under the scheme."""
        return INT8 if activations == "int8" else None

    def multiply(self, x: Tensor, weight: QTensor, rounding: Rounding | None) -> Tensor:
        """Map x [..., K] to round(x) W^T [..., N] in x's dtype."""
        rows, columns = weight.shape
        x = x if rounding is None else rounding(x)
        count = rows if rows * columns <= LARGE else LARGE // columns
        parts = [weight.rows(slice(start, start + count)) for start in range(0, rows, count)]
        products = [F.linear(x, part.dequantize(x.dtype)) for part in parts]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    # a device

    @property
    def device_bits(self) -> int:
        """Return the bits of a code in an artifact."""
        return self.bits

    def device_nbytes(self, shape: tuple[int, int], width: int) -> int:
        """Return the bytes of a weight [N, K] in an artifact whose floats have `width` bytes."""
        return self.nbytes(shape)

    def device_rounding(self, rounding: Rounding | None) -> Rounding | None:
        """Return how the artifact's operator rounds its input, which may differ from `rounding`."""
        return None

    def check_table(self, shape: tuple[int, int]) -> None:
        """Refuse an embedding [V, E] if the device has no operator that reads single rows of this format."""
        raise DiffbitError(
            f"an embedding {tuple(shape)} cannot be {self}, whose single rows no operator of a device reads; wanted "
            "int8, a format in groups of 32, 64 or 128, such as int4_g32 or nl3_g32_s8, or none"
        )

    def store(self, g: Builder, weight: QTensor) -> StoredWeight:
        """Add the weight as initializers for `gather` and `product`; only for formats that an embedding can have."""
        raise NotImplementedError

    def gather(self, g: Builder, ids: Value, stored: StoredWeight, shape: tuple[int, int]) -> Value:
        """Add nodes that read the rows `ids` of a stored table [V, E]."""
        raise NotImplementedError

    def product(self, g: Builder, x: Value, stored: StoredWeight, shape: tuple[int, int], factor: float) -> Value:
        """Add nodes for factor * round(x) W^T with a stored weight."""
        raise NotImplementedError

    def blocks(self, weight: QTensor, rounds: bool = False) -> Blocks:
        """Return the weight as ONNX Runtime's low-bit operators compute with it: only for formats that are `in_blocks`.
        rounds: they round their inputs in the same blocks."""
        raise NotImplementedError

    @abstractmethod
    def onnx(self, g: Builder, x: Value, weight: QTensor, factor: float, rounding: Rounding | None) -> Value:
        """Add nodes for factor * round(x) W^T; the factor ((1 - lambda_init) in diff_v1) should go into the scales."""


@dataclass(frozen=True, eq=False)
class QTensor:
    """A weight [N, K] in a format.

    codes   uint8 [N, K], one code per element
    scale   fp32 [N, G] (per_tensor formats: [1, 1])
    zero    uint8 [N, G], asymmetric integers only
    tensor_scale  fp32 [1, 1], or [N, 1] of several weights: what a checkpoint's scales are relative to, in formats
            that are `tensor_scaled`; `scale` includes it. None: as the format chooses it
    """

    format: Format
    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    tensor_scale: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        self.format.check((rows + -rows % self.format.rows_together, columns))  # it may be some rows of a weight
        scale_shape = self.format.scale_shape(self.shape)
        expected = {"codes": (self.shape, torch.uint8), "scale": (scale_shape, torch.float32)}
        if not self.format.symmetric:
            expected["zero"] = (scale_shape, torch.uint8)
        for part, (shape, dtype) in expected.items():
            tensor = getattr(self, part)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                kind = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise DiffbitError(f"a {self.format} weight {self.shape} has {kind} as {part}, wanted {dtype} {shape}")
        if self.format.symmetric and self.zero is not None:
            raise DiffbitError(f"a {self.format} weight has zero points, but the format is symmetric and has none")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] as floats, computed in fp32."""
        return self.format.decode(self.codes, self.scale, self.zero, dtype)

    def packed(self) -> Tensor:
        """Return the codes as a checkpoint stores them: uint8 of `format.packed_shape`."""
        return self.format.pack(self.codes)

    def packed_zero(self) -> Tensor | None:
        """Return the zero points as a checkpoint stores them: a bit stream per row, [N, ceil(G*bits/8)]."""
        return None if self.zero is None else pack_bits(self.zero, self.format.bits)

    def parts(self) -> dict[str, Tensor]:
        """Return the weight as a checkpoint stores it: "codes", "scale" and, in asymmetric formats, "zero"."""
        scale, zero = self.relative_scale(), self.packed_zero()
        stored = {"codes": self.packed(), "scale": self.format.write_scale(scale)}
        stored |= {"tensor_scale": self.whole_scale()} if self.format.tensor_scaled else {}
        return stored if zero is None else stored | {"zero": zero}

    def whole_scale(self) -> Tensor:
        """Return `tensor_scale`, or that of the format's choice."""
        return self.format.tensor_scale(self.scale) if self.tensor_scale is None else self.tensor_scale

    def relative_scale(self) -> Tensor:
        """Return the scales as a checkpoint has them, fp32 [N, G]: relative to `tensor_scale`, if there is one."""
        return self.scale / self.whole_scale() if self.format.tensor_scaled else self.scale

    @classmethod
    def from_packed(
        cls,
        format: Format,
        shape: tuple[int, int],
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        tensor_scale: Tensor | None = None,
    ) -> QTensor:
        """Invert `parts`."""
        rows, columns = shape
        format.check(shape)
        _expect(format, shape, "codes", codes, format.packed_shape(shape))
        codes = format.unpack(codes, columns)
        if zero is not None and not format.symmetric:
            groups = format.groups(columns)
            _expect(format, shape, "zero", zero, (rows, row_bytes(groups, format.bits)))
            zero = unpack_bits(zero, format.bits, groups)
        scale = format.read_scale(scale)
        if tensor_scale is None:
            return cls(format, shape, codes, scale, zero)
        if tensor_scale.shape != (1, 1) or not 0 < tensor_scale < torch.inf:
            shown = tensor_scale.item() if tensor_scale.numel() == 1 else tuple(tensor_scale.shape)
            raise DiffbitError(f"a {format} weight {shape} has tensor_scale {shown}, wanted one number above 0")
        tensor_scale = tensor_scale.float()
        return cls(format, shape, codes, scale * tensor_scale, zero, tensor_scale)

    @property
    def nbytes(self) -> int:
        """Bytes in a checkpoint: packed codes, scales and zero points."""
        return self.format.nbytes(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """Return nbytes * 8 / number of weights, scales included: 4.5 for int4_g32, not 4."""
        return self.nbytes * 8 / (self.shape[0] * self.shape[1])

    def rows(self, rows: slice | Tensor) -> QTensor:
        """Return some rows of the weight; a slice shares memory with it, so a large weight can be streamed."""
        codes = self.codes[rows]
        scale = self.scale if self.format.per_tensor else self.scale[rows]
        zero = None if self.zero is None else self.zero[rows]
        tensor_scale = (
            self.tensor_scale if self.tensor_scale is None or len(self.tensor_scale) == 1 else self.tensor_scale[rows]
        )
        return QTensor(self.format, (codes.shape[0], codes.shape[1]), codes, scale, zero, tensor_scale)

    @staticmethod
    def stack(weights: Sequence[QTensor]) -> QTensor:
        """Concatenate weights of one format along the rows."""
        first = weights[0]
        codes = torch.cat([weight.codes for weight in weights])
        zero = None if first.zero is None else torch.cat([weight.zero for weight in weights if weight.zero is not None])
        scale = torch.cat([weight.scale.expand(weight.shape[0], -1) for weight in weights])
        tensor_scale = None
        if first.format.tensor_scaled:
            tensor_scale = torch.cat([weight.whole_scale().expand(weight.shape[0], 1) for weight in weights])
        return QTensor(first.format.stacked, (codes.shape[0], codes.shape[1]), codes, scale, zero, tensor_scale)

    def to(self, device: torch.device | str) -> QTensor:
        zero = None if self.zero is None else self.zero.to(device)
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale.to(device)
        return QTensor(self.format, self.shape, self.codes.to(device), self.scale.to(device), zero, tensor_scale)


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows of about BLOCK elements each."""
    count = max(1, BLOCK // weight.shape[1])
    for start in range(0, len(weight), count):
        yield slice(start, min(start + count, len(weight)))


def by_group(format: Format, weight: Tensor, reduce: Any) -> Tensor:
    """Apply reduce, fp32 [n, G, group] -> [n, G], to all rows of a weight [N, K], some at a time; returns [N, G]."""
    values = torch.empty(0)
    for rows in row_blocks(weight):
        part = reduce(format.grouped(weight[rows].float()))
        if not rows.start:  # one large tensor, because many small ones between float blocks fragment the heap
            values = part.new_empty(len(weight), *part.shape[1:])
        values[rows] = part
    return values


def divisor(scale: Tensor) -> Tensor:
    """Return scales to divide by: 0, the scale of a group of zeros, becomes infinity, so that quotients are 0."""
    return scale.masked_fill(scale == 0, torch.inf)


def chosen(table: Tensor, indices: Tensor) -> Tensor:
    """Return table[indices], three times as fast as torch's indexing on a CPU."""
    return table.index_select(0, indices.flatten()).view(indices.shape)


def finite(scale: Tensor) -> Tensor:
    if not scale.isfinite().all():
        raise DiffbitError("the weight holds NaN or infinity, which no format can represent; the checkpoint is damaged")
    return scale


def shared_block(columns: int) -> int:
    """Return the largest block size up to ROW_BLOCK that pads little, for rows whose blocks all have one scale."""
    return max(32, math.gcd(columns, ROW_BLOCK))


def nbits(g: Builder, x: Value, codes: Value, scales: Value, zeros: Value | None, **attributes: int) -> Value:
    """Add a MatMulNBits node. Unless its accuracy_level is 0, it rounds its input to int8, with one scale per block of
    the weight.

    codes uint8 [N, blocks, block_size*bits/8], scales [N, blocks] of x's dtype, zeros uint8 [N, ceil(blocks*bits/8)]
    (None: 2^(bits-1)); attributes: K, N, bits, block_size.
    """
    inputs = [x, codes, scales] if zeros is None else [x, codes, scales, zeros]
    return g.op("MatMulNBits", inputs, domain=MICROSOFT, **{"accuracy_level": ACCURACY_LEVEL} | attributes)


def _expect(format: Format, shape: tuple[int, int], part: str, tensor: Tensor, expected: tuple[int, int]) -> None:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != expected:
        raise DiffbitError(
            f"a {format} weight {shape} has packed {part} {tensor.dtype} {tuple(tensor.shape)}, wanted uint8 {expected}"
        )
