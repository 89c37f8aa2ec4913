"""`diffbit.GatherLowBit`: reads rows of an embedding table in the layout of LowBitMatMul, as GatherQuantized does.

    y = v d * (r * factor)      for row id, column by column; in float32, rounded to T at the end

Inputs
    ids                                 int64 [...]            0 to N - 1
    codes, scales, row_scales, levels   of lowbit_matmul.py    c (which gives v), d, r
    factor                              T [1]                  float32 or float16; determines T
Output
    Y                                   T [..., K]
Attributes: K, N, group_size, bits, spec_version.

A tied table is stored once. The body gathers whole tiles and picks one row of each; of trellis codes it decodes the
whole table, which ONNX Runtime does once, at load.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema
from .body import Nodes, Value
from .int4_matmul import TILE
from .lowbit_matmul import MIDDLE, LowBitWeight, bytes_of, unpack, values
from .signature import Type

if TYPE_CHECKING:
    import onnx_ir
    import torch

OP = schema.GATHER_LOWBIT


def body(op: Nodes, bits: int, table: bool, ring: bool) -> Value:
    ids, planes, scales, row_scales, levels, factor = op.inputs
    K, flat = op.dim("K"), ids.reshape(-1)
    tile, row = flat / TILE, op("Mod", flat, TILE).unsqueeze(1)

    def rows(tiles: Value, *row_first: int) -> Value:  # its rows to the front, one of each tile: [m, ...]
        return op("GatherND", op("Gather", tiles, tile, axis=0).transpose(*row_first), row, batch_dims=1)

    if ring:
        v = op("Gather", bytes_of(op, planes, levels, bits, table, ring), flat, axis=0)
    else:
        v = bytes_of(op, rows(planes, 0, 4, 1, 2, 3, 5).unsqueeze(4), levels, bits, table, ring)  # [m, G, group_size]
    v = v.cast(Type.FLOAT32) - float(MIDDLE if table else 2 ** (bits - 1))
    row_scale = op("Gather", row_scales.expand(planes.size(0), TILE).reshape(-1), flat).reshape(-1, 1, 1)
    row_factor = row_scale.cast(Type.FLOAT32) * factor.cast(Type.FLOAT32)
    y = v * rows(scales, 0, 2, 1).unsqueeze(-1).cast(Type.FLOAT32) * row_factor
    return y.reshape([0, -1]).slice(0, K, 1).reshape(op("Shape", ids), K).like(factor)


def function(bits: int, table: bool = False, ring: bool = False) -> onnx_ir.Function:
    """Return the body for a table of `bits`; a model has only one embedding."""
    return OP.function(partial(body, bits=bits, table=table, ring=ring))


def reference(ids: torch.Tensor, packed: LowBitWeight, factor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Compute the op in torch, bit for bit: ids int64 [...], table [N = rows, K = columns] -> [..., K]."""
    group_size = packed.codes.shape[2] * 32
    codes, scales, row_scales = unpack(packed, rows, columns)
    scales = scales.float().repeat_interleave(group_size, 1)[:, :columns]
    table = values(codes, packed.levels, packed.codes.shape[3]).float() * scales * (row_scales.float() * factor.float())
    return table[ids].to(factor.dtype)
