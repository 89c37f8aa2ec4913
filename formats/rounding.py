"""Rounding of a linear layer's input to integers, for quantized models and for their training.

    8 bits    a = max(max|x|, 1e-5) / 127    q = round-half-to-even(x / a)                  b1.58, arXiv 2402.17764
    4 bits    a = max(mean|x|, 1e-5) / sqrt 7    q = clip(round-half-to-even(x / a), -8, 7)    v2, arXiv 2504.18415
    8 bits, in blocks of a token's numbers    a = max|x| / 127 of each block, q likewise

with one scale a per token, or per block of it. A Hadamard matrix H can spread the input's outliers before rounding
(v2's H-BitLinear). The weight is then multiplied by H before it is rounded, too, because

    x W^T = (x H) (W H)^T

so the float model is unchanged.
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
    """bits: 8 or 4. hadamard: block size of a Hadamard transform before rounding (ops/hadamard.py); 1: none. block:
    size of the blocks that share a scale; 0: one scale per token."""

    bits: int = 8
    hadamard: int = 1
    block: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Transform and round x [..., K]; returns floats in its dtype."""
        if self.block:
            return quantize_per_block_int8(x, self.block)
        q, a = rounded_input(x, self)
        return (q * a).to(x.dtype)


INT8 = Rounding()


def quantize_per_token_int8(x: Tensor) -> Tensor:
    """Round x [..., K] to int8 with one scale per token (BitNet b1.58, arXiv 2402.17764); returns floats."""
    return INT8(x)


def quantize_per_block_int8(x: Tensor, block: int) -> Tensor:
    """Round x [..., K] to int8 with one scale per block of `block` numbers (the last may be short); returns floats.

    a = max|x| / 127 in each block, q = round-half-even(x * (127 / max|x|)), as ONNX Runtime's MatMulNBits rounds its
    input on x86 at accuracy level 4, where `block` is the weight's block size (tests/formats/test_rounding.py), and as
    the op Int4MatMul does everywhere. On ARM, MatMulNBits rounds ties away from zero.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))  # [..., G, block]
    largest = blocks.abs().amax(-1, keepdim=True)
    # not 127 / largest: torch rounds twice when it divides a number by a tensor
    inverse = (torch.full_like(largest, 127) / largest).masked_fill(largest == 0, 0)
    return (torch.round(blocks * inverse) * (largest / 127)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def rounded_input(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Round x [..., K] to integers q, as fp32 [..., K], with one scale a fp32 [..., 1] per token: q * a ~ spread(x).

    No gradient passes through q; `spread` alone has a gradient.
    """
    return ternary_matmul.rounded(spread(x, rounding), rounding.bits)


def spread(x: Tensor, rounding: Rounding | None) -> Tensor:
    """Return x H in x's dtype for an input or a weight x [..., K], bit-identical to the op Hadamard; has a gradient."""
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
    """Return `rounded` in the dtype of `exact`; gradients pass to `exact` unchanged."""
    through: Tensor = _StraightThrough.apply(exact, rounded)
    return through


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.to(exact.dtype).view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
