"""`diffbit.Int4MatMul`: int8 activations times 4-bit weights in groups, as MatMulNBits computes at accuracy level 4.

Definition, for every row x of A in groups of `group_size` numbers, g = 0 ... G-1, the last padded with zeros:

    m_g = max|x|    a_g = m_g / 127    q = round-half-to-even(x * (127 / m_g))    in int8; m_g < 1e-30: all of it is 0
    s_n = 0; for g in order: s_n = fma(float32(sum_k q_k (c_nk - z_ng)), d_ng * a_g, s_n)      the sum in int32, exact
    y_n = s_n * factor

all in float32, each operation rounded once and in this order, so that every instruction set, GPU, number of threads and
number of rows gives the same bits. A group with an infinity or a NaN has a_g = NaN and q = 0, so its row is NaN.
One scale per row and group is more accurate than one per row, and is what ONNX Runtime does: on x86 it computes exactly
the same q. On ARM it rounds ties away from zero, so a q on a tie may differ by one.

Inputs
    A       T [..., K]                                 float32 or float16; computed in float32
    codes   uint8 [N/16, G, group_size/8, 16, 4]       c, two per byte; all quotients here are rounded up
    scales  float16 [N/16, G, 16]                      d
    zeros   uint8 [N/16, G, 16] or [1, 1, 1]           z, 0 to 15; a single 8 for symmetric formats
    factor  float [1]
Output
    Y       T [..., N]
Attributes: K, N, group_size (32, 64 or 128), spec_version.

Layout: tiles of 16 rows of the weight. A tile is a sequence of groups, a group a sequence of steps of 8 weights, a step
the 4 bytes of each of its 16 rows: byte b holds weight 2b in its low nibble and 2b+1 in its high one. So one load of 64
bytes (two of 32, four of 16) has the same 8 weights of 16 rows, each row in its own 32-bit lane. Low and high nibbles
are multiplied with four even and four odd activations, which are broadcast to all lanes, and each lane accumulates the
dot product of its row. Nothing is summed across lanes, and every instruction set reads the file unchanged. Rows beyond
N have scale 0, weights beyond K are zero points.

The order of the nibbles is MatMulNBits'. The body only rearranges constants, which ONNX Runtime does once, at load; a
MatMulNBits node remains.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from . import schema
from .body import END, Nodes, Value
from .signature import Type

if TYPE_CHECKING:
    import torch

OP = schema.INT4_MATMUL
GROUP_SIZES = (32, 64, 128)
TILE = 16  # rows
STEP = 8  # weights of a row
ROWS_AT_A_TIME = 1 << 13  # in `pack`, a multiple of TILE, to avoid copying a large table as a whole
SMALLEST = 1e-30  # lower bound of m_g, for which 127 / m_g is finite and a_g not subnormal


def body(op: Nodes, bits: int = 4) -> Value:
    """bits: 8 for int8_matmul.py."""
    A, codes, scales, zeros, factor = op.inputs
    N, group_size, groups = op.dim("N"), op.dim("group_size"), codes.size(1)

    def rows(tiles: Value) -> Value:  # [tiles, G or 1, 16] -> [tiles, 16, G or 1] -> [N, G]
        return tiles.transpose(0, 2, 1).reshape(-1, tiles.size(1)).slice(0, N, 0).expand(N, groups)

    if bits == 4:  # [tiles, G, steps, 16, 4] -> [tiles, 16, G, steps, 4] -> [N, G, group_size/2]
        B = codes.transpose(0, 3, 1, 2, 4).reshape(-1, groups, group_size / 2).slice(0, N, 0)
    else:  # [tiles, G, steps, 2, 16, 4] -> [tiles, 16, G, steps, 4, 2] -> [N, G, group_size]
        B = codes.transpose(0, 4, 1, 2, 5, 3).reshape(-1, groups, group_size).slice(0, N, 0)
    B_scales = (rows(scales).cast(Type.FLOAT32) * factor).like(A)
    B_zeros = rows(zeros.expand(op("Shape", scales)))
    if bits == 4:  # two to a byte, the last alone where G is odd; Pad is what ONNX Runtime 1.23 refuses in a function
        column = op.ints(0).cast(Type.UINT8).expand(N, 1)
        low, high = B_zeros.slice(0, END, 1, 2), op("Concat", B_zeros, column, axis=1).slice(1, END, 1, 2)
        B_zeros = op("BitwiseOr", low, op("BitShift", high, op.ints(4).cast(Type.UINT8), direction="LEFT"))
    attributes = {"K": op.reference("K"), "N": op.reference("N"), "block_size": op.reference("group_size")}
    inputs = A, B, B_scales, B_zeros
    return op("com.microsoft.MatMulNBits", *inputs, **attributes, bits=bits, accuracy_level=4)


class TiledWeight(NamedTuple):
    """A weight as the op's inputs."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


function = partial(OP.function, body)


def pack(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int, bits: int = 4
) -> TiledWeight:
    """Pack codes uint8 [N, K] below 2^bits, scales [N, G] representable in float16, and zero points uint8 [N, G] (None:
    2^(bits - 1)). bits: 8 for the layout of int8_matmul.py, where scales and zero points may be [N, 1]."""
    import torch
    import torch.nn.functional as F

    rows, columns = codes.shape
    groups, more_rows = -(-columns // group_size), -rows % TILE
    scales = scale.half()
    if not torch.equal(scales.float(), scale.float()):
        raise ValueError("the scales are not representable in float16; round them first")
    middle = 2 ** (bits - 1)
    shape = (groups, group_size // STEP, TILE, 4) if bits == 4 else (groups, group_size // STEP, 2, TILE, 4)
    packed = codes.new_empty(-(-rows // TILE), *shape)
    for start in range(0, rows, ROWS_AT_A_TIME):
        part = codes[start : start + ROWS_AT_A_TIME]
        last = zero[start : start + len(part), -1:] if zero is not None else codes.new_full((len(part), 1), middle)
        part = torch.cat((part, last.expand(len(part), groups * group_size - columns)), 1)
        pairs = F.pad(part, (0, 0, 0, -len(part) % TILE)).view(-1, TILE, groups, group_size // STEP, STEP // 2, 2)
        if bits == 4:
            part = (pairs[..., 0] | pairs[..., 1] << 4).permute(0, 2, 3, 1, 4)  # [tiles, G, steps, 16, 4]
        else:
            part = pairs.permute(0, 2, 3, 5, 1, 4)  # [tiles, G, steps, 2, 16, 4]
        packed[start // TILE :][: len(part)] = part

    def tiles(values: torch.Tensor) -> torch.Tensor:  # [N, G] -> [tiles, G, 16]
        return F.pad(values, (0, 0, 0, more_rows)).view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()

    zeros = codes.new_full((1, 1, 1), middle) if zero is None else tiles(zero)
    return TiledWeight(packed, tiles(scales), zeros)


def unpack(packed: TiledWeight, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Invert `pack`: codes uint8 [N, K], scales float16 [N, G], zero points uint8 [N, G]."""
    import torch

    if packed.codes.ndim == 5:
        pairs = torch.stack((packed.codes & 15, packed.codes >> 4), -1).permute(0, 3, 1, 2, 4, 5)
    else:
        pairs = packed.codes.permute(0, 4, 1, 2, 5, 3)
    codes = pairs.flatten(2).flatten(0, 1)  # [tiles, 16, G, steps, 4, 2] -> [16 tiles, G * group_size]
    scales, zeros = packed.scales, packed.zeros.expand(packed.scales.shape)
    by_row = [x.transpose(1, 2).flatten(0, 1)[:rows] for x in (scales, zeros)]
    return codes[:rows, :columns], by_row[0], by_row[1]


def reference(a: torch.Tensor, packed: TiledWeight, factor: torch.Tensor, rows: int, group_size: int) -> torch.Tensor:
    """Compute the op in torch, bit for bit: A [..., K] float, a weight of N = `rows` rows -> [..., N] in A's dtype."""
    groups = packed.codes.shape[1]
    codes, *by_row = unpack(packed, rows, groups * group_size)
    scales, zeros = (values.expand(rows, groups) for values in by_row)
    values = codes.short() - zeros.repeat_interleave(group_size, 1)
    return (sums_of(a, values, scales, group_size) * factor.float()).to(a.dtype)


def sums_of(a: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return s [..., N] of the definition in float32, of A [..., K], weights int16 [N, G * group_size] less their zero
    points, and scales [N, G]."""
    import torch
    import torch.nn.functional as F

    x = F.pad(a.float(), (0, values.shape[1] - a.shape[-1])).unflatten(-1, (-1, group_size))  # [..., G, group]
    largest = x.abs().amax(-1, keepdim=True)
    tiny, wild = largest < SMALLEST, ~largest.isfinite()
    # not 127 / largest: torch rounds twice when it divides a number by a tensor
    inverse = torch.full_like(largest, 127) / largest
    q = torch.round(x * inverse).masked_fill(tiny | wild, 0)
    step = (largest / 127).masked_fill(tiny, 0).masked_fill(wild, torch.nan)  # [..., G, 1]
    sums = torch.zeros(*a.shape[:-1], len(values))
    for g in range(scales.shape[1]):
        weight = values[:, g * group_size : (g + 1) * group_size].double()
        exact = q[..., g, :].double() @ weight.T  # integers, far below 2^53
        sums = _fma(exact, scales[:, g].float() * step[..., g, :], sums)
    return sums


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c rounded once to float32; b and c float32, a an integer below 2^24 as float64.

    The product is exact in float64. The sum is rounded to odd (its last bit is set if it is inexact), which avoids
    double rounding (Boldo and Melquiond, 2008).
    """
    import torch

    product, addend = a * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    even = (error != 0) & (bits & 1 == 0) & total.isfinite()
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(even, bits + toward, bits).view(torch.float64).float()
