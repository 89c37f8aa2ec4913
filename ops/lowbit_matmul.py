"""`diffbit.LowBitMatMul`: int8 activations times weights of 1 to 6 bits in groups, integers or levels of a table.

Activations are rounded as in int4_matmul.py, to q with one scale a_g per row and group. Then, for every row n:

    v_nk = c_nk - 2^(bits - 1)    or, with a table of levels, v_nk = levels[c_nk] - 128
    s_n = 0; for g in order: s_n = fma(float32(sum_k q_k v_nk), float32(d_ng) * a_g, s_n)    the sum in int32, exact
    y_n = s_n * (float32(r_n) * factor)

all in float32, each operation rounded once and in this order: the same bits everywhere. v of a weight of trellis codes
also depends on other rows' codes: trellis.py.

Inputs
    A           T [..., K]                                      float32 or float16; computed in float32
    codes       uint8 [N/16, G, group_size/32, bits, 16, 4]     c, in planes; all quotients here are rounded up
    scales      float16 or int8 [N/16, G, 16]                   d
    row_scales  float16 [N/16, 16], or [1, 1]: a single 1       r
    levels      uint8 [2^bits] for 1 to 4 bits, or [1]: a single 2^(bits - 1) for integers of 2 to 6 bits, or what
                trellis.py says
    factor      float [1]
Output
    Y           T [..., N]
Attributes: K, N, group_size (32, 64 or 128), bits (1 to 6), spec_version.

Scales of 8 bits under one float16 per row (ggml has such scales of scales) cost half of what float16 scales do.

Layout: tiles of 16 rows and groups, as in int4_matmul.py. A group is a sequence of runs of 32 weights, a run eight
quads: the even four of its first eight weights, their odd four, the even four of the next eight, and so on. In a tile,
a run is `bits` planes of 64 bytes, four for each of the 16 rows: byte b of a row has, in fields, bits of weight b of
each quad; quad 0 is in the lowest bits of the first plane, quad 7 in the highest of the last.

    bits 1   one plane of fields of 1 bit
    bits 4   four planes of fields of 4 bits: the bytes of Int4MatMul
    bits 2   two planes of fields of 2 bits
    bits 3   two planes of 2 bits, then one plane of 1 bit, the codes' highest
    bits 5   four planes of 4 bits, then one plane of 1 bit
    bits 6   four planes of 4 bits, then two planes of 2 bits

So a load of 64 bytes has bits of 16 rows, each in its own 32-bit lane, and a weight takes `bits` bits in the mapped
file, which kernels and GatherLowBit (gather_lowbit.py) read in place. The body unpacks the planes, which ONNX Runtime
does once, at load, for a MatMulNBits of 4 bits where they suffice, else of 8 bits.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from . import schema, trellis
from .body import Nodes, Value
from .int4_matmul import ROWS_AT_A_TIME, TILE, sums_of
from .signature import Type

if TYPE_CHECKING:
    import onnx_ir
    import torch

OP = schema.LOWBIT_MATMUL
RUN, QUADS = 32, 8  # weights of a row, in quads of four
# Widths of the fields that make a code, its lowest bits first; fields of w bits take w planes
FIELDS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}
MIDDLE = 128  # of the levels


class LowBitWeight(NamedTuple):
    """A weight as the op's inputs."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_scales: torch.Tensor
    levels: torch.Tensor


def fields(bits: int) -> list[tuple[int, int]]:
    """Return (first plane, width) of the fields of a code; the first plane is also the field's lowest bit in it."""
    return [(after - width, width) for after, width in zip(accumulate(FIELDS[bits]), FIELDS[bits], strict=True)]


def unpacked(op: Nodes, planes: Value, bits: int) -> Value:
    """[tiles, G, group_size/32, bits, rows, 4] -> codes [tiles * rows, G, group_size]."""
    codes = None
    for first, width in fields(bits):
        shifts = op.ints(*range(0, 8, width)).reshape([-1, 1, 1]).cast(Type.UINT8)
        part = planes.slice(first, first + width, 3).unsqueeze(4)
        part = op("BitShift", part, shifts, direction="RIGHT")  # [..., width, 8 / width, rows, 4]
        part = op("BitwiseAnd", part, op.ints(2**width - 1).cast(Type.UINT8))
        part = op("BitShift", part, op.ints(first).cast(Type.UINT8), direction="LEFT").reshape([0, 0, 0, QUADS, -1, 4])
        codes = part if codes is None else op("BitwiseOr", codes, part)
    assert codes is not None
    steps = codes.reshape([0, 0, -1, 2, 0, 4]).transpose(0, 4, 1, 2, 5, 3)  # [tiles, rows, G, steps, 4, 2]
    return steps.reshape(-1, planes.size(1), op.dim("group_size"))


def bytes_of(op: Nodes, planes: Value, levels: Value, bits: int, table: bool, ring: bool) -> Value:
    """Return v + MIDDLE of a weight with levels, else codes: uint8 [tiles * rows, G, group_size]."""
    codes = unpacked(op, planes, bits)
    if ring:
        return trellis.body(op, codes, levels, bits)
    return op("Gather", levels, codes.cast(Type.INT32)) if table else codes


def body(op: Nodes, bits: int, table: bool, ring: bool) -> Value:
    A, planes, scales, row_scales, levels, factor = op.inputs
    N, groups = op.dim("N"), planes.size(1)
    container, zero = 8 if table or bits > 4 else 4, MIDDLE if table else 2 ** (bits - 1)
    B = bytes_of(op, planes, levels, bits, table, ring).slice(0, N, 0)  # [N, G, group_size]
    zeros = op.ints(zero).cast(Type.UINT8).expand(N, groups)
    if container == 4:  # two to a byte
        low, high = (part.squeeze(-1) for part in op.split(B.reshape([0, 0, -1, 2]), -1, 2))
        B = op("BitwiseOr", low, op("BitShift", high, op.ints(4).cast(Type.UINT8), direction="LEFT"))
        zeros = op.ints(zero << 4 | zero).cast(Type.UINT8).expand(N, (groups + 1) / 2)
    by_row = scales.cast(Type.FLOAT32).transpose(0, 2, 1).reshape(-1, groups).slice(0, N, 0)  # [N, G]
    row_factor = row_scales.cast(Type.FLOAT32).reshape(-1, 1).slice(0, N, 0) * factor  # [N or 1, 1]
    attributes = {"K": op.reference("K"), "N": op.reference("N"), "block_size": op.reference("group_size")}
    inputs = A, B, (by_row * row_factor).like(A), zeros
    return op("com.microsoft.MatMulNBits", *inputs, **attributes, bits=container, accuracy_level=4)


def function(bits: int, table: bool = False, ring: bool = False, name: str | None = None) -> onnx_ir.Function:
    """Return the body for weights of `bits`, with a table of levels or without, or (table and ring) of trellis codes.
    name: one of the op's names."""
    return OP.function(partial(body, bits=bits, table=table, ring=ring), name=name)


def pack(
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    levels: torch.Tensor | None,
    group_size: int,
    bits: int,
) -> LowBitWeight:
    """Pack codes uint8 [N, K] below 2^bits, scales [N, G], int8 or representable in float16, scales of rows [N] or
    [N, 1] representable in float16 (None: 1), and the op's levels (None: integers)."""
    import torch
    import torch.nn.functional as F

    rows, columns = codes.shape
    groups, middle = -(-columns // group_size), 2 ** (bits - 1)

    def half(values: torch.Tensor) -> torch.Tensor:
        if not torch.equal(values.half().float(), values.float()):
            raise ValueError("the scales are not representable in float16; round them first")
        return values.half()

    def tiles(values: torch.Tensor) -> torch.Tensor:  # [N, G] -> [tiles, G, 16]
        padded = F.pad(values, (0, 0, 0, -rows % TILE))
        return padded.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()

    packed = codes.new_empty(-(-rows // TILE), groups, group_size // RUN, bits, TILE, 4)
    for start in range(0, rows, ROWS_AT_A_TIME):
        part = codes[start : start + ROWS_AT_A_TIME]
        part = F.pad(F.pad(part, (0, groups * group_size - columns), value=middle), (0, 0, 0, -len(part) % TILE))
        steps = part.view(-1, TILE, groups, group_size // RUN, QUADS // 2, 4, 2)
        quads = steps.permute(0, 2, 3, 4, 6, 1, 5).flatten(3, 4)  # [tiles, G, runs, 8, 16, 4]
        for first, width in fields(bits):
            bits_of = (quads >> first & 2**width - 1).unflatten(3, (width, 8 // width))
            planes = packed[start // TILE :][: len(quads), :, :, first : first + width]
            planes.copy_((bits_of << _shifts(width, codes)).sum(4))
    scales = tiles(scale if scale.dtype == torch.int8 else half(scale))
    row_scales = scale.new_ones(1, 1).half() if row_scale is None else tiles(half(row_scale.view(-1, 1))).squeeze(1)
    return LowBitWeight(packed, scales, row_scales, codes.new_full((1,), middle) if levels is None else levels)


def _shifts(width: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_tensor(range(0, 8, width)).view(-1, 1, 1)


def unpack(packed: LowBitWeight, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Invert `pack`: codes uint8 [N, K], scales [N, G], scales of rows float16 [N, 1]."""
    planes = packed.codes
    quads = planes.new_zeros(*planes.shape[:3], QUADS, TILE, 4)
    for first, width in fields(planes.shape[3]):
        part = planes[:, :, :, first : first + width, None] >> _shifts(width, planes) & 2**width - 1
        quads |= part.flatten(3, 4) << first
    steps = quads.unflatten(3, (QUADS // 2, 2)).permute(0, 5, 1, 2, 3, 6, 4)  # [tiles, 16, G, runs, 4, 4, 2]
    codes = steps.flatten(2).flatten(0, 1)
    row_scales = packed.row_scales.expand(len(planes), TILE).reshape(-1, 1)
    return codes[:rows, :columns], packed.scales.transpose(1, 2).flatten(0, 1)[:rows], row_scales[:rows]


def values(codes: torch.Tensor, levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Return v int16, shaped as the codes [N, K]."""
    if len(levels) == trellis.levels_size(bits):
        return trellis.values(codes, levels, bits)
    return codes.short() - levels.short() if len(levels) == 1 else levels.short()[codes.long()] - MIDDLE


def reference(a: torch.Tensor, packed: LowBitWeight, factor: torch.Tensor, rows: int, group_size: int) -> torch.Tensor:
    """Compute the op in torch, bit for bit: A [..., K] float, a weight of N = `rows` rows -> [..., N] in A's dtype."""
    codes, scales, row_scales = unpack(packed, rows, packed.codes.shape[1] * group_size)
    sums = sums_of(a, values(codes, packed.levels, packed.codes.shape[3]), scales, group_size)
    return (sums * (row_scales[:, 0].float() * factor.float())).to(a.dtype)
