"""`diffbit.GatherQuantized`: reads rows of an embedding table, in the layout of Int4MatMul and Int8MatMul.

    y = (c - z) d * factor      for row id, column by column; in float32, rounded to T at the end

Inputs
    ids     int64 [...]                   0 to N - 1
    codes   uint8                         c, in the layout of Int4MatMul (bits 4) or Int8MatMul (bits 8)
    scales  float16 [N/16, G or 1, 16]    d
    zeros   uint8, shaped as scales, or [1, 1, 1]: a single 2^(bits - 1) for symmetric formats
    factor  T [1]                         float32 or float16; determines T
Output
    Y       T [..., K]
Attributes: K, N, group_size, bits (4 or 8), spec_version.

A tied table is stored once: the embedding and the head read the same initializers from the mapped file. A row shares
its pages with the 15 others of its tile, so an untied embedding has only a few pages in memory per token that occurred.

The body gathers whole tiles and picks one row of each.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema
from .body import Nodes, Value
from .int4_matmul import TILE, TiledWeight, unpack
from .signature import Type

if TYPE_CHECKING:
    import onnx_ir
    import torch

OP = schema.GATHER


def body(op: Nodes, bits: int) -> Value:
    ids, codes, scales, zeros, factor = op.inputs
    K, flat = op.dim("K"), ids.reshape(-1)
    tile, row = flat / TILE, op("Mod", flat, TILE).unsqueeze(1)

    def rows(tiles: Value) -> Value:  # [m, 16, ...] -> [m, ...]
        return op("GatherND", tiles, row, batch_dims=1)

    # [m, G, steps * 1 or 2, 16, 4] -> [m, G, steps * 1 or 2, 4] -> [m, G, steps, 4, 2]
    tiles = op("Gather", codes, tile, axis=0).reshape([0, 0, -1, TILE, 4])
    bytes = rows(tiles.transpose(0, 3, 1, 2, 4))
    if bits == 4:
        low = op("BitwiseAnd", bytes, op.ints(15).cast(Type.UINT8))
        high = op("BitShift", bytes, op.ints(4).cast(Type.UINT8), direction="RIGHT")
        numbers = op("Concat", low.unsqueeze(-1), high.unsqueeze(-1), axis=-1)
    else:
        numbers = bytes.reshape([0, 0, -1, 2, 4]).transpose(0, 1, 2, 4, 3)

    # [m, G or 1, 16] -> [m, G or 1, 1]
    scale, zero = (
        rows(op("Gather", x, tile, axis=0).transpose(0, 2, 1)).unsqueeze(-1).cast(Type.FLOAT32)
        for x in (scales, zeros.expand(op("Shape", scales)))
    )
    y = (numbers.reshape([0, 0, -1]).cast(Type.FLOAT32) - zero) * scale * factor.cast(Type.FLOAT32)
    return y.reshape([0, -1]).slice(0, K, 1).reshape(op("Shape", ids), K).like(factor)


def function(bits: int) -> onnx_ir.Function:
    """Return the body for a table of `bits`; a model has only one embedding."""
    return OP.function(partial(body, bits=bits))


def reference(ids: torch.Tensor, packed: TiledWeight, factor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Compute the op in torch, bit for bit: ids int64 [...], table [N = rows, K = columns] -> [..., K]."""
    codes, *by_row = unpack(packed, rows, columns)
    groups = packed.codes.shape[1]
    group_size = packed.codes[0, 0].numel() * (2 if packed.codes.ndim == 5 else 1) // 16
    scales, zeros = (v.expand(rows, groups).repeat_interleave(group_size, 1)[:, :columns] for v in by_row)
    table = (codes.float() - zeros.float()) * scales.float() * factor.float()
    return table[ids].to(factor.dtype)
