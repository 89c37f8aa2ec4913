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

from typing import TYPE_CHECKING

from . import schema
from .int4_matmul import Packed, unpack

if TYPE_CHECKING:
    import onnx_ir
    import torch

OP = schema.GATHER

BODY = """
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  rest = Constant <value_ints = [-1]> ()
  tile_i = Constant <value_int = 16> ()
  K_0d = Constant <value_int: int = @K> ()
  K_1d = Reshape (K_0d, one)

  flat = Reshape (ids, rest)
  tile = Div (flat, tile_i)
  row = Mod (flat, tile_i)
  index = Unsqueeze (row, one)

  # a row of 16 in each tile: [m, G, steps * 1 or 2, 16, 4] -> [m, G, steps * 1 or 2, 4]
  by_run = Constant <value_ints = [0, 0, -1, 16, 4]> ()
  tiles_5d = Gather <axis = 0> (codes, tile)
  runs = Reshape (tiles_5d, by_run)
  turned = Transpose <perm = [0, 3, 1, 2, 4]> (runs)
  bytes = GatherND <batch_dims = 1> (turned, index)

NUMBERS
  by_group = Constant <value_ints = [0, 0, -1]> ()
  code_groups = Reshape (numbers, by_group)

  # [m, G or 1, 16] -> [m, 16, G or 1] -> [m, G or 1, 1]
  scale_tiles = Gather <axis = 0> (scales, tile)
  scale_turned = Transpose <perm = [0, 2, 1]> (scale_tiles)
  scale_rows = GatherND <batch_dims = 1> (scale_turned, index)
  scale_column = Unsqueeze (scale_rows, rest)
  scale_f = Cast <to = 1> (scale_column)
  tile_shape = Shape (scales)
  zero_full = Expand (zeros, tile_shape)
  zero_tiles = Gather <axis = 0> (zero_full, tile)
  zero_turned = Transpose <perm = [0, 2, 1]> (zero_tiles)
  zero_rows = GatherND <batch_dims = 1> (zero_turned, index)
  zero_column = Unsqueeze (zero_rows, rest)
  zero_f = Cast <to = 1> (zero_column)

  code_f = Cast <to = 1> (code_groups)
  above = Sub (code_f, zero_f)
  scaled = Mul (above, scale_f)
  factor_f = Cast <to = 1> (factor)
  times = Mul (scaled, factor_f)
  two_d = Constant <value_ints = [0, -1]> ()
  padded = Reshape (times, two_d)
  cut = Slice (padded, zero, K_1d, one)
  lead = Shape (ids)
  shape = Concat <axis = 0> (lead, K_1d)
  shaped = Reshape (cut, shape)
  Y = CastLike (shaped, factor)
}
"""

NUMBERS = {  # uint8 [m, G, runs, 4] -> [m, G, steps, 4, 2]
    4: """
  nibble_i = Constant <value_int = 15> ()
  four_i = Constant <value_int = 4> ()
  nibble = Cast <to = 2> (nibble_i)
  four = Cast <to = 2> (four_i)
  low = BitwiseAnd (bytes, nibble)
  high = BitShift <direction = "RIGHT"> (bytes, four)
  low_5d = Unsqueeze (low, rest)
  high_5d = Unsqueeze (high, rest)
  numbers = Concat <axis = -1> (low_5d, high_5d)
""",
    8: """
  pair_shape = Constant <value_ints = [0, 0, -1, 2, 4]> ()
  pairs = Reshape (bytes, pair_shape)
  numbers = Transpose <perm = [0, 1, 2, 4, 3]> (pairs)
""",
}


def function(bits: int) -> onnx_ir.Function:
    """Return the body for a table of `bits`; a model has only one embedding."""
    return OP.function(BODY.replace("NUMBERS", NUMBERS[bits]))


def reference(ids: torch.Tensor, packed: Packed, factor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Compute the op in torch, bit for bit: ids int64 [...], table [N = rows, K = columns] -> [..., K]."""
    codes, *by_row = unpack(packed, rows, columns)
    groups = packed.codes.shape[1]
    group_size = packed.codes[0, 0].numel() * (2 if packed.codes.ndim == 5 else 1) // 16
    scales, zeros = (v.expand(rows, groups).repeat_interleave(group_size, 1)[:, :columns] for v in by_row)
    table = (codes.float() - zeros.float()) * scales.float() * factor.float()
    return table[ids].to(factor.dtype)
