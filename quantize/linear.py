"""A linear layer with a quantized weight, and the ways its input is rounded to int8. Everything in plain torch.

This is the meaning of a quantized model that its exports are held against; it saves memory on disk, not time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .formats import Format
from .qtensor import QTensor
from .rounding import INT8, Rounding, rounded_input

Activations = Callable[[Tensor], Tensor]
ROW_BLOCK = 128  # of the container's blocks that stand for "one scale per row"


class QuantLinear(nn.Module):
    """y = act(x) W^T, x [..., K] -> [..., N], W a QTensor [N, K] dequantized in x's dtype.

    activations: a function applied to x first, such as `quantize_per_token_int8`; None: x as it is. A ternary weight
    computes what the op TernaryMatMul does, rounded activations included: it is given `rounding` in their place.
    """

    def __init__(self, weight: QTensor, activations: Activations | None = None, rounding: Rounding = INT8) -> None:
        super().__init__()
        self.weight = weight
        self.activations = activations
        self.rounding = rounding

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if self.activations is not None:
            x = self.activations(x)
        if self.weight.format.kind == "ternary":
            return ternary_linear(x, self.weight, self.rounding)
        return F.linear(x, self.weight.dequantize(x.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow .to(device); .to(dtype) changes nothing here: codes are integers and scales stay fp32."""
        super()._apply(fn, recurse)
        self.weight = self.weight.to(fn(torch.empty(0, device=self.weight.codes.device)).device)
        return self

    def extra_repr(self) -> str:
        rounding = f", {self.rounding}" if self.weight.format.kind == "ternary" else ""
        return f"{self.in_features} -> {self.out_features}, {self.weight.format}{rounding}"


def ternary_linear(x: Tensor, weight: QTensor, rounding: Rounding = INT8) -> Tensor:
    """The op diffbit.TernaryMatMul (ops/ternary_matmul.py), behind a Hadamard where the rounding has one: whole numbers
    as activations, an exact integer sum, times a * scale.

    float32 holds every partial sum exactly: they are integers below 127 * K < 2^24 for K up to 132,000.
    """
    q, a = rounded_input(x, rounding)
    with torch.autocast(x.device.type, enabled=False):  # which would round the sums
        sums = F.linear(q, weight.codes.float() - 1)
    return (sums * a * weight.scale.view(1)).to(x.dtype)


def quantize_per_token_int8(x: Tensor) -> Tensor:
    """x [..., K] rounded to int8 with one scale per token (BitNet b1.58, arXiv 2402.17764), as floats again."""
    q, a = rounded_input(x, INT8)
    return (q * a).to(x.dtype)


def quantize_per_block_int8(x: Tensor, block: int) -> Tensor:
    """x [..., K] rounded to int8 with one scale per `block` neighbours (the last may be short), as floats again.

    a = max|x| / 127 in each block, q = round-half-even(x * (127 / max|x|)): what ONNX Runtime's MatMulNBits does to its
    input on x86 at accuracy level 4, `block` being the weight's block size (tests/quantize/test_linear.py), and what
    the op Int4MatMul does everywhere. On ARM, MatMulNBits rounds ties away from zero.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))  # [..., G, block]
    largest = blocks.abs().amax(-1, keepdim=True)
    # not 127 / largest: for a number over a tensor torch rounds twice
    inverse = (torch.full_like(largest, 127) / largest).masked_fill(largest == 0, 0)
    return (torch.round(blocks * inverse) * (largest / 127)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def matmul_nbits_activations(bits: int, block_size: int) -> Activations | None:
    """What MatMulNBits at accuracy level 4 does to its input on the CPU (ONNX Runtime 1.31); None: it stays float.

    4- and 8-bit weights: int8 per block at every block size, 16 to 256. 2-bit weights: int8 at 32, 64 and 128; 16 and
    256 have no integer kernel and run, very slowly, in float. Signs of scales, zero points and short last blocks make
    no difference.
    """
    if bits in (4, 8) or (bits == 2 and block_size in (32, 64, 128)):
        return partial(quantize_per_block_int8, block=block_size)
    return None


def container(format: Format) -> tuple[int, int]:
    """(bits, block size) in which the operators of an artifact hold an integer format's codes (export/linear.py)."""
    bits = 2 if format.bits == 2 else 4 if format.bits <= 4 else 8
    block = format.group_size or ROW_BLOCK
    if bits == 2 and block == 16:
        bits = 4
    return bits, min(block, ROW_BLOCK) if bits == 2 else block


def runtime_activations(format: Format) -> Activations | None:
    """What the operator of an artifact does to the input of a weight in this format; None: nothing.

    The rounding of a ternary layer is part of QuantLinear itself.
    """
    return matmul_nbits_activations(*container(format)) if format.kind == "int" else None
