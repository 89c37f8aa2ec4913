"""A quantized weight: codes, scales and zero points, with the format that says what they mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DiffbitError
from .formats import Format
from .packing import pack_bits, row_bytes, unpack_bits


@dataclass(frozen=True, eq=False)
class QTensor:
    """A weight [N, K] in a format.

    codes   uint8 [N, K], one code an element
    scale   fp32 [N, G] (ternary: [1, 1])
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
        """Codes as they lie in files: uint8 [N, row_bytes] (formats.py says in which layout)."""
        return self.format.pack(self.codes)

    def packed_zero(self) -> Tensor | None:
        """Zero points as they lie in files: a little-endian bit stream per row, [N, ceil(G*bits/8)]."""
        return None if self.zero is None else pack_bits(self.zero, self.format.bits)

    @classmethod
    def from_packed(
        cls, format: Format, shape: tuple[int, int], codes: Tensor, scale: Tensor, zero: Tensor | None = None
    ) -> QTensor:
        """From `packed()` codes, scales in any float dtype, and `packed_zero()`."""
        rows, columns = shape
        format.check(shape)
        _expect(format, shape, "codes", codes, format.packed_shape(shape))
        codes = format.unpack(codes, columns)
        if format.kind == "ternary" and codes.numel() and codes.max() > 2:
            raise DiffbitError(f"a ternary weight {shape} holds a code of 3, wanted 0, 1 or 2; the file is damaged")
        if zero is not None and not format.symmetric:
            groups = format.groups(columns)
            _expect(format, shape, "zero", zero, (rows, row_bytes(groups, format.bits)))
            zero = unpack_bits(zero, format.bits, groups)
        return cls(format, shape, codes, scale.float(), zero)

    @property
    def nbytes(self) -> int:
        """Bytes in a file: packed codes, scales and zero points."""
        return self.format.nbytes(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """nbytes * 8 over the number of weights: 4.5 for int4_g32, not 4."""
        return self.nbytes * 8 / (self.shape[0] * self.shape[1])

    def rows(self, rows: slice) -> QTensor:
        """Some rows of the weight, sharing memory: what streams through a large one."""
        codes = self.codes[rows]
        scale = self.scale if self.format.kind == "ternary" else self.scale[rows]
        zero = None if self.zero is None else self.zero[rows]
        return QTensor(self.format, (codes.shape[0], codes.shape[1]), codes, scale, zero)

    def to(self, device: torch.device | str) -> QTensor:
        zero = None if self.zero is None else self.zero.to(device)
        return QTensor(self.format, self.shape, self.codes.to(device), self.scale.to(device), zero)


def _expect(format: Format, shape: tuple[int, int], part: str, tensor: Tensor, wanted: tuple[int, int]) -> None:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted:
        raise DiffbitError(
            f"a {format} weight {shape} has packed {part} {tensor.dtype} {tuple(tensor.shape)}, wanted uint8 {wanted}"
        )
