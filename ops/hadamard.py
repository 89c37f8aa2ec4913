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
from .body import Nodes, Value
from .signature import Type

if TYPE_CHECKING:
    import torch

OP = schema.HADAMARD


def body(op: Nodes) -> Value:
    (A,) = op.inputs
    return transform(op, A.cast(Type.FLOAT32), op.dim("block")).like(A)


def transform(op: Nodes, rows: Value, block: Value) -> Value:
    """Write the transform of rows float32 [..., K] in a body; block: int64 [1]."""
    width = block.squeeze(0).cast(Type.FLOAT32)
    stages = op("Round", op("Log", width) / op("Log", 2.0)).cast(Type.INT64)

    # [h, n], n the blocks of all rows, so that long runs are added. Each stage is the same: of neighbours (u, v) along
    # h first all sums, then all differences, which makes neighbours of those that the next stage wants
    columns = rows.reshape(-1, block).transpose(1, 0)
    count = columns.size(1)
    pairs = op.shape((block / 2, 2, count))

    def stage(_: Value, x: Value) -> Value:
        u, v = op.split(x.view(pairs), 1, 2)
        return op("Concat", u + v, u - v, axis=0)

    columns = op.loop(stages, columns.view(block, 1, count), stage, "float[n, h, w]").view(block, count)
    scale = op("Sqrt", op.number(1) / width)  # the same as float32(1 / sqrt(h)), since 1 / h is exact
    return columns.transpose(1, 0).view(op("Shape", rows)) * scale


function = partial(OP.function, body)


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
