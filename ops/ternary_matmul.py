"""`diffbit.TernaryMatMul`: rounded activations times {-1, 0, 1} weights of two bits each (BitNet).

Exact definition for every row x of A (length K), in float32 except for m:

    8 bits    a = max(max|x|, 1e-5) / 127      q = round-half-to-even(x / a)               b1.58, arXiv 2402.17764
    4 bits    a = max(m, 1e-5) / sqrt 7        q = clip(round-half-to-even(x / a), -8, 7)    v2, arXiv 2504.18415
    y_n = float32(sum_k q_k w_nk) * a * scale_n                       the sum in int32, exact; left to right

m is the mean of |x|, defined so that it does not depend on the order of summation: in float64, with C = 2 K max|x|,

    m = float32(sum_k ((|x_k| + C) - C) / K)

where + C and - C round |x_k| to a multiple of C's last place, about 2^-52 C, and sums of K such numbers are exact.

Inputs
    A       T [..., K]           float32 or float16; computed in float32
    packed  uint8 [N, 32*ceil(K/128)]
    scale   float [1] or [N]     the weight is scale * w; [N]: a scale for each of its rows
Output
    Y       T [..., N]
Attributes: K, N, activation_bits (8 or 4), spec_version.

Layout of `packed`: each row is a sequence of blocks of 128 weights in 32 bytes; byte j of a block holds the weights j,
j+32, j+64 and j+96 as codes w+1 in bits 0-1, 2-3, 4-5 and 6-7. One 32-byte load and three shifts give four vectors of
32 codes for 32 consecutive activations each, so every instruction set reads the file unchanged. Padding beyond K has
code 1 (zero).

The body unpacks only constants, with shifts and masks, so ONNX Runtime folds it to int8 once, at load.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from . import kv_cache, schema

if TYPE_CHECKING:
    import torch

OP = schema.TERNARY_MATMUL
BLOCK = 128  # weights in a block
BLOCK_BYTES = 32

BODY = """
{
  one = Constant <value_ints = [1]> ()
  zero = Constant <value_ints = [0]> ()
  rest = Constant <value_ints = [-1]> ()
  two = Constant <value_ints = [2]> ()
  K_0d = Constant <value_int: int = @K> ()
  N_0d = Constant <value_int: int = @N> ()
  K_1d = Reshape (K_0d, one)
  N_1d = Reshape (N_0d, one)

  # [N, blocks, 1, 32] >> (0, 2, 4, 6) & 3 -> [N, blocks, 4, 32] -> [N, K] -> int8 [K, N]
  block_bytes = Constant <value_ints = [32]> ()
  block_shape = Concat <axis = 0> (N_1d, rest, one, block_bytes)
  blocks = Reshape (packed, block_shape)
  shift_values = Constant <value_ints = [0, 2, 4, 6]> ()
  shift_shape = Constant <value_ints = [4, 1]> ()
  shift_row = Reshape (shift_values, shift_shape)
  shifts = Cast <to = 2> (shift_row)
  shifted = BitShift <direction = "RIGHT"> (blocks, shifts)
  three_i = Constant <value_int = 3> ()
  three = Cast <to = 2> (three_i)
  fields = BitwiseAnd (shifted, three)
  code_shape = Concat <axis = 0> (N_1d, rest)
  codes_padded = Reshape (fields, code_shape)
  codes = Slice (codes_padded, zero, K_1d, one)
  codes_signed = Cast <to = 3> (codes)
  one_i = Constant <value_int = 1> ()
  one_8 = Cast <to = 3> (one_i)
  weight_rows = Sub (codes_signed, one_8)
  weight = Transpose <perm = [1, 0]> (weight_rows)

  A_f = Cast <to = 1> (A)
  magnitude = Abs (A_f)
  largest = ReduceMax <keepdims = 1> (magnitude, rest)
  smallest = Constant <value_float = 1e-5> ()
  # Its condition is a constant: ONNX Runtime keeps one of the branches
  bits = Constant <value_int: int = @activation_bits> ()
  four = Constant <value_int = 4> ()
  four_bits = Equal (bits, four)
  a, rounded = If (four_bits) <
    then_branch = by_mean () => (a_4, codes_4) {
      magnitude_d = Cast <to = 11> (magnitude)
      largest_d = Cast <to = 11> (largest)
      K_d = Cast <to = 11> (K_1d)
      two_d = Cast <to = 11> (two)
      twice_K = Mul (K_d, two_d)
      grid = Mul (largest_d, twice_K)
      lifted = Add (magnitude_d, grid)
      on_grid = Sub (lifted, grid)
      total = ReduceSum <keepdims = 1> (on_grid, rest)
      mean_d = Div (total, K_d)
      mean = Cast <to = 1> (mean_d)
      mean_clamped = Max (mean, smallest)
      root_7 = Constant <value_float = 2.6457513> ()
      a_4 = Div (mean_clamped, root_7)
      scaled_4 = Div (A_f, a_4)
      rounded_4 = Round (scaled_4)
      lowest = Constant <value_float = -8.0> ()
      highest = Constant <value_float = 7.0> ()
      codes_4 = Clip (rounded_4, lowest, highest)
    },
    else_branch = by_largest () => (a_8, codes_8) {
      clamped = Max (largest, smallest)
      levels = Constant <value_float = 127.0> ()
      a_8 = Div (clamped, levels)
      scaled_8 = Div (A_f, a_8)
      codes_8 = Round (scaled_8)
    }
  >
  # ONNX Runtime is a hundred times faster at uint8 by int8 on the CPU than at int8 by int8
  middle_f = Constant <value_float = 128.0> ()
  raised = Add (rounded, middle_f)
  q = Cast <to = 2> (raised)
  middle = Cast <to = 2> (middle_f)
  sums = MatMulInteger (q, weight, middle)
  sums_f = Cast <to = 1> (sums)
  scale_f = Cast <to = 1> (scale)
  # Not sums * (a * scale): ONNX Runtime fuses that into MatMulIntegerToFloat, whose last bit differs
  stepped = Mul (sums_f, a)
  product = Mul (stepped, scale_f)
  Y = CastLike (product, A)
}
"""

function = partial(OP.function, BODY)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack integers {-1, 0, 1} [N, K] into uint8 [N, 32*ceil(K/128)] in the op's layout."""
    from torch.nn.functional import pad

    codes = pad((weight + 1).byte(), (0, -weight.shape[1] % BLOCK), value=1)
    return kv_cache.pack(codes, 2, BLOCK_BYTES)


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Invert `pack`: uint8 [N, 32*ceil(K/128)] -> int8 {-1, 0, 1} [N, K]."""
    return kv_cache.unpack(packed, 2, BLOCK_BYTES)[:, :columns].char() - 1


def rounded(a: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Round A [..., K] to integers q fp32 [..., K] with scales a fp32 [..., 1], as in the module's docstring."""
    import torch

    def divided(x: torch.Tensor, number: float) -> torch.Tensor:
        return x / torch.full_like(x, number)  # not x / number: on a GPU torch multiplies by the inverse

    x = a.float()
    magnitude = x.abs()
    largest = magnitude.amax(-1, keepdim=True)
    if bits == 8:
        step = divided(largest.clamp_min(1e-5), 127)
        return torch.round(x / step), step
    grid = largest.double() * (2 * a.shape[-1])
    total = ((magnitude.double() + grid) - grid).sum(-1, keepdim=True)
    step = divided(divided(total, a.shape[-1]).float().clamp_min(1e-5), math.sqrt(7))
    return torch.round(x / step).clamp_(-8, 7), step


def reference(a: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Compute the op in torch: A [..., K] float, packed and scale as in the module's docstring -> [..., N]."""
    q, step = rounded(a, bits)
    weight = unpack(packed, a.shape[-1])
    # float64 sums of integers below 2^53 equal the int32 sums exactly; integers have no -0
    sums = (q.double() @ weight.double().T).float() + 0.0
    return (sums * step * scale.float()).to(a.dtype)
