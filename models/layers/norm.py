"""RMSNorm and LayerNorm, for the norms before mixer, MLP and head, and in BitNet models before o_proj and down_proj."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467, eq. 4); divides in float32, as Hugging Face does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (arXiv 1607.06450, eq. 4); divides in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) + self.bias


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
