"""How the input of a ternary layer becomes whole numbers: the one place, for a quantized model and for its training.

    8 bits    a = max(max|x|, 1e-5) / 127        q = round-half-to-even(x / a)              b1.58, arXiv 2402.17764
    4 bits    a = max(mean|x|, 1e-5) / sqrt 7    q = clip(round-half-to-even(x / a), -8, 7)   v2, arXiv 2504.18415

a step per token. At 4 bits, the layers whose inputs have outliers, o_proj and down_proj, are given them spread by a
Hadamard matrix (v2's H-BitLinear), and so are their weights before they are rounded: codes are of W H, because

    x W^T = (x H) (W H)^T

A float model stays what it is, and is the limit of its quantized one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import hadamard, ternary_matmul

SPREAD = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Rounding:
    """bits: 8 or 4. hadamard: neighbours that each number is spread over first (ops/hadamard.py); 1: none."""

    bits: int = 8
    hadamard: int = 1


INT8 = Rounding()


def rounding_for(module: str, columns: int, activations: str | None) -> Rounding:
    """What the ternary layer of this name and in_features does to its input under a scheme's activations."""
    if activations != "int4":
        return INT8
    return Rounding(4, hadamard.block_size(columns) if module.rpartition(".")[2] in SPREAD else 1)


def rounded_input(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """x [..., K] of any float dtype -> whole numbers q as fp32 [..., K], and steps a fp32 [..., 1]: q * a ~ spread(x).

    No gradient passes through q; `spread` by itself has one.
    """
    return ternary_matmul.rounded(spread(x, rounding), rounding.bits)


def spread(x: Tensor, rounding: Rounding) -> Tensor:
    """An input or a weight x [..., K] -> x H in x's dtype, to the bit what the op Hadamard gives; a gradient passes."""
    if rounding.hadamard == 1:
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
