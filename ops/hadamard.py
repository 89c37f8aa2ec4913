"""`diffbit.Hadamard`: every number spread over the `block` neighbours of its row (BitNet v2, arXiv 2504.18415, eq. 3).

    y = x (I x H_h) / sqrt(h),    h = block, a power of two that divides K;  x the Kronecker product

H_h is Sylvester's matrix of +-1, so an outlier of one channel becomes a little of h channels, which four bits can hold.
The matrix is symmetric and orthogonal: the op is its own inverse and its own transpose.

Meaning, bit for bit, in float32 for every block of h numbers: for s = 1, 2, 4, ... h/2 every pair (u, v) that lies s
apart, u in an even run of s numbers, becomes (u + v, u - v); then all are multiplied by float32(1 / sqrt(h)).

Inputs
    A       T [..., K]           float32 or float16; computed in float32
Output
    Y       T [..., K]
Attributes: block, spec_version.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DOMAIN = "diffbit"
NAME = "Hadamard"
VERSION = 1  # of the meaning; a kernel checks it against the attribute spec_version


def block_size(columns: int) -> int:
    """The largest power of two that divides K: all of it where K is a power of two, as in the paper."""
    return columns & -columns


def reference(a: torch.Tensor, block: int) -> torch.Tensor:
    """The op in torch: A [..., K] float -> [..., K] in A's dtype. No gradient passes: quantize/rounding.py has one."""
    import torch

    # [h, n], n the blocks of all rows: each stage adds and subtracts long runs, whatever its s
    x = a.detach().float().reshape(-1, block).T.contiguous()
    y = torch.empty_like(x)
    count = x.shape[1]
    for stage in range(block.bit_length() - 1):
        before, after = (buffer.view(-1, 2, (1 << stage) * count) for buffer in (x, y))
        torch.add(before[:, 0], before[:, 1], out=after[:, 0])
        torch.sub(before[:, 0], before[:, 1], out=after[:, 1])
        x, y = y, x
    return (x.T.reshape(a.shape) * (1 / math.sqrt(block))).to(a.dtype)
