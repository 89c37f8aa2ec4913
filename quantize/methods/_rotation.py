"""Orthogonal matrices that spread every number over all channels, applied without forming them.

    R = diag(signs) (H_n x C_m) / sqrt(n),    width = n m,  n its largest power-of-two factor, x the Kronecker product
    H_n    Sylvester's Hadamard matrix, +-1
    C_m    Hartley's, cos(2 pi ij / m) + sin(2 pi ij / m), over sqrt m: orthogonal for every m, so any width works
    signs  random +-1 from a seed: a randomised Hadamard transform (QuaRot, arXiv 2404.00456, section 3)

S = (H_n x C_m) / sqrt(n) is symmetric, and its first column is constant. So

    R = S diag(signs) S,    signs_0 = 1

leaves constant vectors and every mean unchanged: LayerNorm commutes with it, as RMSNorm does with any rotation.

The magnitudes of the first R's entries are at most sqrt(2 / width); if the width is a power of two, all are
1 / sqrt(width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 20  # numbers rotated at a time


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R [width, width] that depends only on its seed; keeps_mean: the second R above."""

    width: int
    seed: int
    keeps_mean: bool = False

    def right(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """Return x diag(scale) R for x [N, width] and scale [width]; computed in float64, at least fp32."""
        signs = self._signs(x.device)
        if self.keeps_mean:
            return _by_rows(x, lambda rows: _spread(_spread(rows * scale) * signs))
        scale = scale * signs
        return _by_rows(x, lambda rows: _spread(rows * scale))

    def right_inverse(self, x: Tensor) -> Tensor:
        """Return x R^T for x [N, width]."""
        if self.keeps_mean:  # symmetric
            return self.right(x)
        return _by_rows(x, lambda rows: _spread(rows) * self._signs(x.device))  # _spread's matrix is symmetric

    def left_inverse(self, x: Tensor) -> Tensor:
        """Return R^T x for x [width, K]."""
        return self.right(x.T).T.contiguous()  # R^T x = (x^T R)^T

    def _signs(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(2, (self.width,), generator=generator).double().to(device) * 2 - 1
        if self.keeps_mean:
            signs[0] = 1
        return signs


def _by_rows(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to rows in float64, some at a time, so that no whole embedding is held in float64."""
    result = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    count = max(1, BLOCK // x.shape[1])
    for start in range(0, len(x), count):
        result[start : start + count] = change(x[start : start + count].double())
    return result


def _spread(x: Tensor) -> Tensor:
    """Return x (H_n x C_m) / sqrt n for x [N, width] float64."""
    width = x.shape[1]
    power = width & -width  # n
    x = x.unflatten(-1, (power, -1))  # [N, n, m]
    half = 1
    while half < power:
        low, high = x.unflatten(1, (-1, 2, half)).unbind(2)  # [N, n / 2 half, half, m]
        x = torch.stack((low + high, low - high), dim=2).flatten(1, 3)
        half *= 2
    if x.shape[2] > 1:
        x = x @ hartley(x.shape[2]).to(x.device)
    return x.flatten(1) / math.sqrt(power)


def hartley(size: int) -> Tensor:
    """Return the orthogonal, symmetric matrix (cos + sin)(2 pi ij / size) / sqrt(size), float64."""
    index = torch.arange(size)
    angle = torch.outer(index, index).remainder(size).double() * (2 * math.pi / size)
    return (angle.cos() + angle.sin()) / math.sqrt(size)
