"""`diffbit.Int8MatMul`: int8 activations times 8-bit weights; like int4_matmul.py except for:

Inputs
    A       T [..., K]                                    float32 or float16; computed in float32
    codes   uint8 [N/16, G, group_size/8, 2, 16, 4]       c, one per byte; all quotients here are rounded up
    scales  float16 [N/16, G or 1, 16]                    d; 1: one scale per row of the weight
    zeros   uint8, shaped as scales, or [1, 1, 1]         z, 0 to 255; a single 128 for symmetric formats
    factor  float [1]
Output
    Y       T [..., N]
Attributes: K, N, group_size (32, 64 or 128: of activations, and of weights unless they have one scale per row),
spec_version.

Layout: tiles of 16 rows, as in int4_matmul.py. A step of 8 weights is two runs of 64 bytes: the four even weights of
each of the 16 rows, then the four odd ones. Both ops read activations in the same order, GatherQuantized reads rows of
either layout, and kernels use the mapped file without copying.
"""

from __future__ import annotations

from functools import partial

from . import schema
from .int4_matmul import pack as pack_tiles

OP = schema.INT8_MATMUL

BODY = """
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  rest = Constant <value_ints = [-1]> ()
  N_0d = Constant <value_int: int = @N> ()
  N_1d = Reshape (N_0d, one)
  group_0d = Constant <value_int: int = @group_size> ()
  group_1d = Reshape (group_0d, one)
  groups = Shape <start = 1, end = 2> (codes)
  N_by_G = Concat <axis = 0> (N_1d, groups)

  # [tiles, G, steps, 2, 16, 4] -> [tiles, 16, G, steps, 4, 2] -> [N, G, group_size]
  code_tiles = Transpose <perm = [0, 4, 1, 2, 5, 3]> (codes)
  code_shape = Concat <axis = 0> (rest, groups, group_1d)
  code_rows = Reshape (code_tiles, code_shape)
  B = Slice (code_rows, zero, N_1d, zero)

  # [tiles, G or 1, 16] -> [tiles, 16, G or 1] -> [N, G]
  row_width = Shape <start = 1, end = 2> (scales)
  row_shape = Concat <axis = 0> (rest, row_width)
  scale_tiles = Transpose <perm = [0, 2, 1]> (scales)
  scale_rows = Reshape (scale_tiles, row_shape)
  scale_cut = Slice (scale_rows, zero, N_1d, zero)
  scale_all = Expand (scale_cut, N_by_G)
  scale_f = Cast <to = 1> (scale_all)
  scaled = Mul (scale_f, factor)
  B_scales = CastLike (scaled, A)
  tile_shape = Shape (scales)
  zero_full = Expand (zeros, tile_shape)
  zero_tiles = Transpose <perm = [0, 2, 1]> (zero_full)
  zero_rows = Reshape (zero_tiles, row_shape)
  zero_cut = Slice (zero_rows, zero, N_1d, zero)
  B_zeros = Expand (zero_cut, N_by_G)

  Y = com.microsoft.MatMulNBits <K: int = @K, N: int = @N, bits = 8, block_size: int = @group_size, accuracy_level = 4> (A, B, B_scales, B_zeros)
}
"""  # noqa: E501

function = partial(OP.function, BODY)
pack = partial(pack_tiles, bits=8)
