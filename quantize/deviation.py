"""How far quantized weights and outputs are from the float ones: ||A - B|| / ||A||."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import QTensor, row_blocks


def weight_error(weight: Tensor, quantized: QTensor) -> float:
    """Return ||W - Wq|| / ||W||, computed a block of rows at a time; 0 for a weight of zeros."""
    difference = norm = 0.0
    for rows in row_blocks(weight):
        exact = weight[rows].float()
        difference += _square(exact - quantized.rows(rows).dequantize())
        norm += _square(exact)
    return ratio(difference, norm)


class OutputError:
    """||Y - Yq|| / ||Y||, accumulated over batches; the sums are exact, so their order does not matter."""

    def __init__(self) -> None:
        self.difference: list[float] = []
        self.norm: list[float] = []

    def add(self, exact: Tensor, quantized: Tensor) -> None:
        self.difference.append(_square(exact - quantized))
        self.norm.append(_square(exact))

    def join(self, other: OutputError) -> None:
        """Add another's batches."""
        self.difference += other.difference
        self.norm += other.norm

    @property
    def value(self) -> float:
        return ratio(math.fsum(self.difference), math.fsum(self.norm))


def _square(values: Tensor) -> float:
    """Return the sum of squares, accumulated in float64 without a float64 copy."""
    return values.square().sum(dtype=torch.float64).item()


def ratio(difference: float, norm: float) -> float:
    """Return sqrt(difference / norm) of two sums of squares; 0 / 0 is 0."""
    return math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
