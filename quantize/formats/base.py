"""What every number format has, and `QTensor`, a weight in one.

A format is a frozen value that owns all there is to know about itself: scales (`fit`, `candidates`, `stored`), codes
(`encode`, `decode`), the file (`pack`, `write_scale` and their inverses), the product (`rounding`, `multiply`) and the
device (`device_bits`, `device_nbytes`, `device_rounding`, `onnx`). Nobody else asks which format it is.

N is out_features, K in_features, G the groups in a row; the last group of a row may be short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from ...errors import DiffbitError
from ..rounding import INT8, Rounding
from .packing import pack_bits, row_bytes, unpack_bits

if TYPE_CHECKING:
    import onnx_ir

# Weights handled at a time. Float copies stay in cache, and torch runs operations on fewer than 2^15 numbers on the
# calling thread: where others are at work too, its threads' barriers made quantizing ten times slower (1.1 billion
# weights on 2 cores: 80 s in blocks of 2^19, 9 s so); on idle cores they would gain a third.
BLOCK = (1 << 15) - 1
FACTORS = tuple(x / 100 for x in range(100, 30, -4))  # of the range, that `candidates` tries
MICROSOFT = "com.microsoft"
ACCURACY_LEVEL = 4  # of MatMulNBits: int8 inputs; the levels below are fifty times slower at 2 and 8 bits

LARGE = 1 << 26  # weights from which on a product decodes some rows at a time

V = TypeVar("V")


class Stored(NamedTuple, Generic[V]):
    """A weight in a graph, as the format's own operators read it."""

    codes: V
    scale: V
    zero: V


class Builder(Protocol[V]):
    """What `Format.onnx` needs of a graph under construction (export/graph.py); V: a value in it."""

    dtype: type[np.floating[Any]]  # of its floats

    def op(
        self, op_type: str, inputs: Sequence[V | None], *, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> V: ...
    def custom(self, op: ModuleType, inputs: Sequence[V | None], **attributes: Any) -> V: ...
    def customs(
        self,
        op: ModuleType,
        inputs: Sequence[V | None],
        outputs: int,
        body: Callable[[str], onnx_ir.Function],
        of: Hashable = None,
        **attributes: Any,
    ) -> Sequence[V]: ...
    def const(self, values: ArrayLike, dtype: DTypeLike = ...) -> V: ...
    def initializer(self, name: str, array: NDArray[Any]) -> V: ...
    def weight(self, name: str, array: NDArray[np.floating[Any]]) -> V: ...
    def cast(self, x: V, dtype: DTypeLike) -> V: ...


@dataclass(frozen=True)
class Format(ABC):
    """group_size 0: one scale per row (where `per_tensor`: one for the whole weight)."""

    name: str
    bits: int  # of a code in a checkpoint
    group_size: int
    symmetric: bool

    scale_dtype: ClassVar[torch.dtype]  # of the scales in a checkpoint
    activations: ClassVar[tuple[str, ...]] = ()  # of a scheme, that a device's product by such weights can have
    per_tensor: ClassVar[bool] = False
    learned: ClassVar[bool] = False  # training learns its scales (LSQ); else they follow from the weights at each step
    whole_groups: ClassVar[bool] = False  # the last group of a row is as long as the others
    trained: ClassVar[bool] = False  # a model must be trained in it: rounding alone destroys one
    integer_product: ClassVar[bool] = False  # codes - 1, times whole-number inputs, summed as integers

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
        """What somebody who chooses this format should know."""
        if self.device_bits == self.bits:
            return None
        return (
            f"{self} is stored in {self.device_bits} bits on a device, which has no {self.bits}-bit product: it has "
            f"fewer levels than int{self.device_bits} and takes the same bytes"
        )

    def groups(self, columns: int) -> int:
        """G, the scales in a row of `columns` weights."""
        return -(-columns // self.group_size) if self.group_size else 1

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (1, 1) if self.per_tensor else (shape[0], self.groups(shape[1]))

    # scales

    @abstractmethod
    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales fp32 [N, G] (per_tensor [1, 1]) and zero points uint8 [N, G] (or None) for a weight [N, K]."""

    def candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Other scales and zero points, shaped as those of `fit`, that a search may prefer: of shorter ranges."""
        scale, _ = self.fit(weight)
        for factor in FACTORS:
            yield self.stored(scale * factor), None

    def stored(self, scale: Tensor) -> Tensor:
        """Scales fp32 as a checkpoint gives them back."""
        return finite(scale)

    def write_scale(self, scale: Tensor) -> Tensor:
        """Scales fp32, such as `stored` gives, as a checkpoint holds them."""
        return scale.to(self.scale_dtype)

    def read_scale(self, stored: Tensor) -> Tensor:
        """The inverse of `write_scale`; it takes scales of other float types as well."""
        return stored.float()

    # codes

    @property
    def codes(self) -> int:
        """How many codes there are: 0 ... codes - 1."""
        return int(2**self.bits)

    @property
    def spacing(self) -> float:
        """The mean distance of neighbouring values at scale 1."""
        return 1.0

    @abstractmethod
    def bounds(self, zero: Tensor | None) -> tuple[Any, Any]:
        """The weights, at scale 1, between which nothing is clipped; numbers, or tensors shaped as the zero points."""

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest codes, uint8 [N, K], of a weight [N, K] under given scales and zero points."""
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        for rows in row_blocks(weight):
            scales = scale.expand(len(weight), -1)[rows, :, None]  # [n, G, 1]
            nearest = self.encode_each(self.grouped(weight[rows].float()), scales, _rows(zero, rows))
            codes[rows] = nearest.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
        return codes

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> QTensor:
        """A weight [N, K] of any float dtype, rounded to the nearest codes."""
        return QTensor(self, (weight.shape[0], weight.shape[1]), self.encode(weight, scale, zero), scale, zero)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that codes stand for, computed in fp32."""
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for rows in row_blocks(codes):
            scales = scale.expand(len(codes), -1)[rows, :, None]
            value = self.decode_each(self.grouped(codes[rows]), scales, _rows(zero, rows))
            weight[rows] = value.flatten(1)[:, : codes.shape[1]].to(dtype)
        return weight

    def lost(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of a weight at a time, and what rounding to nearest adds to them, [n, G, group]."""
        for rows in row_blocks(weight):
            grouped = self.grouped(weight[rows].float())
            scales, zeros = scale.expand(len(weight), -1)[rows, :, None], _rows(zero, rows)
            yield rows, self.decode_each(self.encode_each(grouped, scales, zeros), scales, zeros).sub_(grouped)

    def grouped(self, values: Tensor) -> Tensor:
        """[n, K] -> [n, G, group]; zeros fill a short last group, which moves no scale, and are cut off again."""
        if not self.group_size:
            return values[:, None]
        if short := -values.shape[1] % self.group_size:
            values = F.pad(values, (0, short))
        return values.unflatten(1, (-1, self.group_size))

    @abstractmethod
    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Nearest codes, of any dtype, element by element: weight, scale and zero broadcast against each other."""

    @abstractmethod
    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The inverse of `encode_each`, fp32."""

    # a checkpoint

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the packed codes of a weight [N, K]."""
        return shape[0], row_bytes(shape[1], self.bits)

    def pack(self, codes: Tensor) -> Tensor:
        """uint8 [N, K] -> uint8 of `packed_shape`: a little-endian bit stream per row, packing.py."""
        return pack_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`; a DiffbitError where a code has no meaning."""
        return unpack_bits(packed, self.bits, columns)

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Bytes of a weight [N, K] in a checkpoint: codes, scales and zero points."""
        (rows, size), (scale_rows, groups) = self.packed_shape(shape), self.scale_shape(shape)
        zero = 0 if self.symmetric else rows * row_bytes(groups, self.bits)
        return rows * size + scale_rows * groups * self.scale_dtype.itemsize + zero

    # the product

    def rounding(self, module: str, columns: int, activations: str | None) -> Rounding | None:
        """What the linear layer of this name and in_features does to its input under a scheme's activations."""
        return INT8 if activations == "int8" else None

    def multiply(self, x: Tensor, weight: QTensor, rounding: Rounding | None) -> Tensor:
        """x [..., K] -> round(x) W^T [..., N] in x's dtype."""
        rows, columns = weight.shape
        x = x if rounding is None else rounding(x)
        some = rows if rows * columns <= LARGE else LARGE // columns
        parts = [weight.rows(slice(start, start + some)) for start in range(0, rows, some)]
        products = [F.linear(x, part.dequantize(x.dtype)) for part in parts]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    # a device

    @property
    def device_bits(self) -> int:
        """Bits of a code in an artifact."""
        return self.bits

    def device_nbytes(self, shape: tuple[int, int], width: int) -> int:
        """Bytes of a weight [N, K] in an artifact whose floats have `width` bytes."""
        return self.nbytes(shape)

    def device_rounding(self, rounding: Rounding | None) -> Rounding | None:
        """What the operator of an artifact does to its input, in the place of `rounding`."""
        return None

    def check_table(self, shape: tuple[int, int]) -> None:
        """Refuse an embedding [V, E] of whose rows a device's operator cannot read single ones."""
        raise DiffbitError(
            f"an embedding cannot be {self}: wanted int8 or another format of 5 to 8 bits, or int3 or int4 in groups "
            "(int4_g32, ...), or none"
        )

    def store(self, g: Builder[V], weight: QTensor) -> Stored[V]:
        """The weight as initializers that `gather` and `product` read, of a format that can be an embedding's."""
        raise NotImplementedError

    def gather(self, g: Builder[V], ids: V, stored: Stored[V], shape: tuple[int, int]) -> V:
        """Nodes for the rows `ids` of a stored table [V, E]."""
        raise NotImplementedError

    def product(self, g: Builder[V], x: V, stored: Stored[V], shape: tuple[int, int], factor: float) -> V:
        """Nodes for factor * round(x) W^T with a stored weight."""
        raise NotImplementedError

    @abstractmethod
    def onnx(self, g: Builder[V], x: V, weight: QTensor, factor: float, rounding: Rounding | None) -> V:
        """Nodes for factor * round(x) W^T. A factor ((1 - lambda_init) of diff_v1) is best put into the scales."""


@dataclass(frozen=True, eq=False)
class QTensor:
    """A weight [N, K] in a format.

    codes   uint8 [N, K], one code an element
    scale   fp32 [N, G] (per_tensor formats: [1, 1])
    zero    uint8 [N, G], asymmetric integers only
    """

    format: Format
    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def __post_init__(self) -> None:
        self.format.check(self.shape)
        scale_shape = self.format.scale_shape(self.shape)
        wanted = {"codes": (self.shape, torch.uint8), "scale": (scale_shape, torch.float32)}
        if not self.format.symmetric:
            wanted["zero"] = (scale_shape, torch.uint8)
        for part, (shape, dtype) in wanted.items():
            tensor = getattr(self, part)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                found = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise DiffbitError(f"a {self.format} weight {self.shape} has {found} as {part}, wanted {dtype} {shape}")
        if self.format.symmetric and self.zero is not None:
            raise DiffbitError(f"a {self.format} weight has zero points, but the format is symmetric and has none")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] as numbers, computed in fp32."""
        return self.format.decode(self.codes, self.scale, self.zero, dtype)

    def packed(self) -> Tensor:
        """Codes as they lie in a checkpoint: uint8 of `format.packed_shape`."""
        return self.format.pack(self.codes)

    def packed_zero(self) -> Tensor | None:
        """Zero points as they lie in a checkpoint: a little-endian bit stream per row, [N, ceil(G*bits/8)]."""
        return None if self.zero is None else pack_bits(self.zero, self.format.bits)

    def parts(self) -> dict[str, Tensor]:
        """{"codes", "scale" and, of asymmetric formats, "zero"}: the weight as a checkpoint holds it."""
        found = {"codes": self.packed(), "scale": self.format.write_scale(self.scale)}
        zero = self.packed_zero()
        return found if zero is None else found | {"zero": zero}

    @classmethod
    def from_packed(
        cls, format: Format, shape: tuple[int, int], codes: Tensor, scale: Tensor, zero: Tensor | None = None
    ) -> QTensor:
        """The inverse of `parts`."""
        rows, columns = shape
        format.check(shape)
        _expect(format, shape, "codes", codes, format.packed_shape(shape))
        codes = format.unpack(codes, columns)
        if zero is not None and not format.symmetric:
            groups = format.groups(columns)
            _expect(format, shape, "zero", zero, (rows, row_bytes(groups, format.bits)))
            zero = unpack_bits(zero, format.bits, groups)
        return cls(format, shape, codes, format.read_scale(scale), zero)

    @property
    def nbytes(self) -> int:
        """Bytes in a checkpoint: packed codes, scales and zero points."""
        return self.format.nbytes(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """nbytes * 8 over the number of weights: 4.5 for int4_g32, not 4."""
        return self.nbytes * 8 / (self.shape[0] * self.shape[1])

    def rows(self, rows: slice | Tensor) -> QTensor:
        """Some rows of the weight; of a slice they share memory: what streams through a large one."""
        codes = self.codes[rows]
        scale = self.scale if self.format.per_tensor else self.scale[rows]
        zero = None if self.zero is None else self.zero[rows]
        return QTensor(self.format, (codes.shape[0], codes.shape[1]), codes, scale, zero)

    @staticmethod
    def stack(weights: Sequence[QTensor]) -> QTensor:
        """Weights of one format, with a scale or more in each row, one below the other."""
        first = weights[0]
        codes = torch.cat([weight.codes for weight in weights])
        zero = None if first.zero is None else torch.cat([weight.zero for weight in weights if weight.zero is not None])
        scale = torch.cat([weight.scale for weight in weights])
        return QTensor(first.format, (codes.shape[0], codes.shape[1]), codes, scale, zero)

    def to(self, device: torch.device | str) -> QTensor:
        zero = None if self.zero is None else self.zero.to(device)
        return QTensor(self.format, self.shape, self.codes.to(device), self.scale.to(device), zero)


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows of about BLOCK elements each."""
    count = max(1, BLOCK // weight.shape[1])
    for start in range(0, len(weight), count):
        yield slice(start, min(start + count, len(weight)))


def by_group(format: Format, weight: Tensor, reduce: Any) -> Tensor:
    """reduce([n, G, group] fp32 -> [n, G]) of all rows of a weight [N, K], some at a time -> [N, G]."""
    found = torch.empty(0)
    for rows in row_blocks(weight):
        part = reduce(format.grouped(weight[rows].float()))
        if not rows.start:  # one tensor: as many small ones between blocks of floats keep the heap from shrinking
            found = part.new_empty(len(weight), *part.shape[1:])
        found[rows] = part
    return found


def divisor(scale: Tensor) -> Tensor:
    """Scales to divide by: a group of zeros, scale 0, becomes zeros again."""
    return scale.masked_fill(scale == 0, torch.inf)


def finite(scale: Tensor) -> Tensor:
    if not scale.isfinite().all():
        raise DiffbitError("the weight holds NaN or infinity, which no format can; the checkpoint is damaged")
    return scale


def nbits(g: Builder[V], x: V, codes: V, scales: V, zeros: V | None, **attributes: int) -> V:
    """A MatMulNBits that rounds its input to int8, one scale per block of the weight.

    codes uint8 [N, blocks, block_size*bits/8], scales [N, blocks] of x's dtype, zeros uint8 [N, ceil(blocks*bits/8)]
    (None: 2^(bits-1)); attributes: K, N, bits, block_size.
    """
    inputs = [x, codes, scales] if zeros is None else [x, codes, scales, zeros]
    return g.op("MatMulNBits", inputs, domain=MICROSOFT, accuracy_level=ACCURACY_LEVEL, **attributes)


def _rows(zero: Tensor | None, rows: slice) -> Tensor | None:
    return None if zero is None else zero[rows, :, None]


def _expect(format: Format, shape: tuple[int, int], part: str, tensor: Tensor, wanted: tuple[int, int]) -> None:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted:
        raise DiffbitError(
            f"a {format} weight {shape} has packed {part} {tensor.dtype} {tuple(tensor.shape)}, wanted uint8 {wanted}"
        )
