"""A linear layer and an embedding with a quantized weight, in plain torch.

They are the reference that exports are compared with; they dequantize at each call and save disk space, not time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models.graph import Builder, Value
from .base import QTensor
from .rounding import Rounding


class QuantLinear(nn.Module):
    """y = round(x) W^T + bias, x [..., K] -> [..., N], W a QTensor [N, K] dequantized in x's dtype.

    rounding: applied to x; None: the weight format's default (int8 for ternary weights, no rounding for others).
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QTensor, rounding: Rounding | None = None, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.rounding = rounding or weight.format.rounding("", weight.shape[1], None)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        product = self.weight.format.multiply(x, self.weight, self.rounding)
        return product if self.bias is None else product + self.bias

    def onnx(self, g: Builder, x: Value, factor: float) -> Value:
        """Add nodes for the product times a factor; the format (formats/) chooses the operator."""
        return self.weight.format.onnx(g, x, self.weight, factor, self.rounding)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow .to(device), and ignore .to(dtype): codes are integers and scales stay fp32."""
        super()._apply(fn, recurse)
        self.weight = self.weight.to(fn(torch.empty(0, device=self.weight.codes.device)).device)
        return self

    def extra_repr(self) -> str:
        rounding = "" if self.rounding is None else f", {self.rounding}"
        return f"{self.in_features} -> {self.out_features}, {self.weight.format}{rounding}"


class QuantEmbedding(nn.Module):
    """Maps ids int64 [...] to rows [..., E] of a QTensor [V, E], in `dtype`."""

    def __init__(self, weight: QTensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.rows(ids.flatten()).dequantize(self.dtype)
        return rows.unflatten(0, ids.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow .to(device) and the dtype of .to(dtype)."""
        like = fn(torch.empty(0, dtype=self.dtype, device=self.weight.codes.device))
        self.weight, self.dtype = self.weight.to(like.device), like.dtype
        return self
