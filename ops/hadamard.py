"""`diffbit.Hadamard`: a Hadamard transform of each block of `block` numbers of a row (arXiv 2504.18415, eq. 3).

    y = x (I x H_h) / sqrt(h),    h = block, a power of two that divides K;  x the Kronecker product

H_h is Sylvester's matrix of +-1. It spreads an outlier of one channel over h channels, so that four bits suffice. The
matrix is symmetric and orthogonal: the op is its own inverse and its own transpose.

Exact definition, in float32, for every block of h numbers: for s = 1, 2, 4, ... h/2, every pair (u, v) at distance s, u
in an even run of s numbers, becomes (u + v, u - v); then all numbers are multiplied by float32(1 / sqrt(h)).

Inputs
    A       T [..., K]           float32 or float16; computed in float32
Output
    Y       T [..., K]
Attributes: block, spec_version.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from . import schema

if TYPE_CHECKING:
    import torch

OP = schema.HADAMARD

BODY = """
{
  one = Constant <value_ints = [1]> ()
  rest = Constant <value_ints = [-1]> ()
  block_0d = Constant <value_int: int = @block> ()
  block_1d = Reshape (block_0d, one)
  block_f = Cast <to = 1> (block_0d)
  block_log = Log (block_f)
  two_f = Constant <value_float = 2.0> ()
  two_log = Log (two_f)
  stages_f = Div (block_log, two_log)
  stages_rounded = Round (stages_f)
  stages = Cast <to = 7> (stages_rounded)

  # [h, n], n the blocks of all rows, so that long runs are added. Each stage is the same: of neighbours (u, v) along h
  # first all sums, then all differences, which makes neighbours of those that the next stage wants
  two = Constant <value_ints = [2]> ()
  half = Div (block_1d, two)
  row_shape = Concat <axis = 0> (rest, block_1d)
  A_f = Cast <to = 1> (A)
  rows = Reshape (A_f, row_shape)
  columns = Transpose <perm = [1, 0]> (rows)
  count = Shape <start = 1, end = 2> (columns)
  before_shape = Concat <axis = 0> (block_1d, one, count)
  pair_shape = Concat <axis = 0> (half, two, count)
  before = Reshape <allowzero = 1> (columns, before_shape)
  always = Constant <value = bool {1}> ()
  after = Loop (stages, always, before) <
    body = stage (int64 i, bool go, float[n, h, w] x) => (bool go_on, float[n, h, w] y) {
      go_on = Identity (go)
      pairs = Reshape <allowzero = 1> (x, pair_shape)
      u, v = Split <axis = 1, num_outputs = 2> (pairs)
      sums = Add (u, v)
      differences = Sub (u, v)
      y = Concat <axis = 0> (sums, differences)
    }
  >
  after_shape = Concat <axis = 0> (block_1d, count)
  after_columns = Reshape <allowzero = 1> (after, after_shape)
  after_rows = Transpose <perm = [1, 0]> (after_columns)
  A_shape = Shape (A)
  shaped = Reshape <allowzero = 1> (after_rows, A_shape)
  block_d = Cast <to = 11> (block_0d)
  root = Sqrt (block_d)
  one_d = Cast <to = 11> (one)
  scale_d = Div (one_d, root)
  scale = Cast <to = 1> (scale_d)
  scaled = Mul (shaped, scale)
  Y = CastLike (scaled, A)
}
"""

function = partial(OP.function, BODY)


def block_size(columns: int) -> int:
    """Return the largest power of two that divides K; K itself if it is a power of two, as in the paper.

    A larger block spreads outliers over more channels, and another stage costs little: all twelve stages of a row of
    4096 numbers take the kernel 5 us, and a product with 4096 x 4096 weights takes 250 us.
    """
    return columns & -columns


def reference(a: torch.Tensor, block: int) -> torch.Tensor:
    """Compute the op in torch: A [..., K] float -> [..., K] in A's dtype, without gradients (formats/rounding.py)."""
    import torch

    # [h, n], n the blocks of all rows: each stage adds and subtracts long runs, whatever its s
    x = a.detach().float().reshape(-1, block).T.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x)
    count = x.shape[1]
    for stage in range(block.bit_length() - 1):
        before, after = (buffer.view(block >> stage + 1, 2, (1 << stage) * count) for buffer in (x, y))
        torch.add(before[:, 0], before[:, 1], out=after[:, 0])
        torch.sub(before[:, 0], before[:, 1], out=after[:, 1])
        x, y = y, x
    return (x.T.reshape(a.shape) * (1 / math.sqrt(block))).to(a.dtype)
