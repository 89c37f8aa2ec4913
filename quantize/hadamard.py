"""Orthogonal matrices that spread every number over all channels, applied without being formed.

    R = diag(signs) (H_n x C_m) / sqrt(n),    width = n m,  n the largest power of two in it, x the Kronecker product
    H_n    Sylvester's Hadamard matrix, +-1
    C_m    Hartley's, cos(2 pi ij / m) + sin(2 pi ij / m), over sqrt m: orthogonal for every m, so any width will do
    signs  random +-1 from a seed: a randomised Hadamard transform (QuaRot, arXiv 2404.00456, section 3)

No entry is larger than sqrt(2 / width); for a power of two all are 1 / sqrt(width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 20  # numbers rotated at a time


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R [width, width], the same for the same seed."""

    width: int
    seed: int

    def right(self, x: Tensor) -> Tensor:
        """x [N, width] of any float dtype -> x R in float64."""
        rows = max(1, BLOCK // self.width)
        return torch.cat([self._rotate(block.double()) for block in x.split(rows)])

    def right_inverse(self, x: Tensor) -> Tensor:
        """x [N, width] -> x R^T in float64."""
        return x.double() @ self.matrix().T.to(x.device)

    def left_inverse(self, x: Tensor) -> Tensor:
        """x [width, K] -> R^T x in float64."""
        return self.right(x.T).T.contiguous()  # R^T x = (x^T R)^T

    def matrix(self) -> Tensor:
        """R in float64."""
        return self.right(torch.eye(self.width))

    def _rotate(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(2, (self.width,), generator=generator).to(x.device, x.dtype) * 2 - 1
        power = self.width & -self.width  # n
        x = (x * signs).unflatten(-1, (power, -1))  # [rows, n, m]
        half = 1
        while half < power:
            low, high = x.unflatten(1, (-1, 2, half)).unbind(2)  # [rows, n / 2 half, half, m]
            x = torch.stack((low + high, low - high), dim=2).flatten(1, 3)
            half *= 2
        if x.shape[2] > 1:
            x = x @ hartley(x.shape[2]).to(x.device)
        return x.flatten(1) / math.sqrt(power)


def hartley(size: int) -> Tensor:
    """The orthogonal and symmetric matrix (cos + sin)(2 pi ij / size) / sqrt(size), float64."""
    index = torch.arange(size)
    angle = torch.outer(index, index).remainder(size).double() * (2 * math.pi / size)
    return (angle.cos() + angle.sin()) / math.sqrt(size)
