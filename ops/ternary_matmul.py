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
from .body import Nodes, Value
from .signature import Type

if TYPE_CHECKING:
    import torch

OP = schema.TERNARY_MATMUL
BLOCK = 128  # weights in a block
BLOCK_BYTES = 32


def body(op: Nodes) -> Value:
    A, packed, scale = op.inputs
    K, N = op.dim("K"), op.dim("N")

    # [N, blocks, 1, 32] >> (0, 2, 4, 6) & 3 -> [N, blocks, 4, 32] -> [N, K] -> int8 [K, N]
    blocks = packed.reshape(N, -1, 1, BLOCK_BYTES)
    shifts = op.ints(0, 2, 4, 6).reshape([4, 1]).cast(Type.UINT8)
    fields = op("BitwiseAnd", op("BitShift", blocks, shifts, direction="RIGHT"), op.ints(3).cast(Type.UINT8))
    codes = fields.reshape(N, -1).slice(0, K, 1).cast(Type.INT8)
    weight = (codes - op.ints(1).cast(Type.INT8)).transpose(1, 0)

    x = A.cast(Type.FLOAT32)
    magnitude = op("Abs", x)
    largest = op("ReduceMax", magnitude, -1, keepdims=1)

    def by_mean() -> tuple[Value, Value]:
        length = K.cast(Type.FLOAT64)
        grid = largest.cast(Type.FLOAT64) * (length * op.ints(2).cast(Type.FLOAT64))
        total = op("ReduceSum", magnitude.cast(Type.FLOAT64) + grid - grid, -1, keepdims=1)
        step = op("Max", (total / length).cast(Type.FLOAT32), 1e-5) / math.sqrt(7)
        return step, op("Clip", op("Round", x / step), -8.0, 7.0)

    def by_largest() -> tuple[Value, Value]:
        step = op("Max", largest, 1e-5) / 127.0
        return step, op("Round", x / step)

    # Its condition is a constant: ONNX Runtime keeps one of the branches
    four_bits = op("Equal", op.attribute("activation_bits"), op.scalar(4))
    branches = {"then_branch": op.graph(by_mean), "else_branch": op.graph(by_largest)}
    a, q = op.several(2, "If", four_bits, **branches)
    # ONNX Runtime is a hundred times faster at uint8 by int8 on the CPU than at int8 by int8
    middle = op("Constant", value_float=128.0)
    sums = op("MatMulInteger", (q + middle).cast(Type.UINT8), weight, middle.cast(Type.UINT8))
    # Not sums * (a * scale): ONNX Runtime fuses that into MatMulIntegerToFloat, whose last bit differs
    return (sums.cast(Type.FLOAT32) * a * scale.cast(Type.FLOAT32)).like(A)


function = partial(OP.function, body)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack integers {-1, 0, 1} [N, K] into uint8 [N, 32*ceil(K/128)] in the op's layout."""
    from torch.nn.functional import pad

    codes = pad((weight + 1).byte(), (0, -weight.shape[1] % BLOCK), value=1)
    return kv_cache.pack_plane(codes, 2, BLOCK_BYTES)


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Invert `pack`: uint8 [N, 32*ceil(K/128)] -> int8 {-1, 0, 1} [N, K]."""
    return kv_cache.unpack_plane(packed, 2, BLOCK_BYTES)[:, :columns].char() - 1


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
