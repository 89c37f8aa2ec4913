"""How the input of a linear layer becomes whole numbers: the one place, for a quantized model and for its training.

    8 bits    a = max(max|x|, 1e-5) / 127    q = round-half-to-even(x / a)                  b1.58, arXiv 2402.17764
    4 bits    a = max(mean|x|, 1e-5) / sqrt 7    q = clip(round-half-to-even(x / a), -8, 7)    v2, arXiv 2504.18415
    8 bits, in blocks of a token's numbers    a = max|x| / 127 of each block, q likewise

with one scale a for a token, or for each block of it. A Hadamard matrix H may spread the input's outliers before it is
rounded (v2's H-BitLinear); the weight is spread too, before it is rounded itself, because

    x W^T = (x H) (W H)^T

A float model stays what it is, and is the limit of its quantized one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import hadamard, ternary_matmul


@dataclass(frozen=True)
class Rounding:
    """bits: 8 or 4. hadamard: neighbours that each number is spread over first (ops/hadamard.py); 1: none. block:
    neighbours that share a scale; 0: all numbers of a token do."""

    bits: int = 8
    hadamard: int = 1
    block: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] spread, rounded, and as floats of its dtype again."""
        if self.block:
            return quantize_per_block_int8(x, self.block)
        q, a = rounded_input(x, self)
        return (q * a).to(x.dtype)


INT8 = Rounding()


def quantize_per_token_int8(x: Tensor) -> Tensor:
    """x [..., K] rounded to int8 with one scale per token (BitNet b1.58, arXiv 2402.17764), as floats again."""
    return INT8(x)


def quantize_per_block_int8(x: Tensor, block: int) -> Tensor:
    """x [..., K] rounded to int8 with one scale per `block` neighbours (the last may be short), as floats again.

    a = max|x| / 127 in each block, q = round-half-even(x * (127 / max|x|)): what ONNX Runtime's MatMulNBits does to its
    input on x86 at accuracy level 4, `block` being the weight's block size (tests/quantize/test_rounding.py), and what
    the op Int4MatMul does everywhere. On ARM, MatMulNBits rounds ties away from zero.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))  # [..., G, block]
    largest = blocks.abs().amax(-1, keepdim=True)
    # not 127 / largest: for a number over a tensor torch rounds twice
    inverse = (torch.full_like(largest, 127) / largest).masked_fill(largest == 0, 0)
    return (torch.round(blocks * inverse) * (largest / 127)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def rounded_input(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """x [..., K] of any float dtype -> whole numbers q as fp32 [..., K], and scales a fp32 [..., 1]: q * a ~ spread(x).

    One scale a token. No gradient passes through q; `spread` by itself has one.
    """
    return ternary_matmul.rounded(spread(x, rounding), rounding.bits)


def spread(x: Tensor, rounding: Rounding | None) -> Tensor:
    """An input or a weight x [..., K] -> x H in x's dtype, to the bit what the op Hadamard gives; a gradient passes."""
    if rounding is None or rounding.hadamard == 1:
        return x
    spread: Tensor = _Spread.apply(x, rounding.hadamard)
    return spread


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int) -> Tensor:
        ctx.block = block
        return hadamard.reference(x, block)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return hadamard.reference(gradients[0], ctx.block), None  # H is symmetric


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, in the dtype of `exact`, through which gradients pass to `exact` unchanged."""
    through: Tensor = _StraightThrough.apply(exact, rounded)
    return through


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.to(exact.dtype).view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
