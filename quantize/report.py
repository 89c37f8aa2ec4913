"""Reports on a quantized model: the error and the size of each weight, and the sizes of the model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import QTensor, row_blocks
from .scheme import Scheme
from .sizes import Sizes


@dataclass(frozen=True)
class WeightReport:
    """One quantized weight.

    weight_error    ||W - Wq|| / ||W||
    output_error    ||X W^T - act(X) Wq^T|| / ||X W^T|| for its inputs X in the float model, over calibration tokens;
                    None without calibration
    proxy_loss      the square of that for its inputs after the earlier quantized layers, which the method saw; None
                    without calibration. For a large head, both are of MEASURED_ROWS rows (layer.py)
    nbytes          bytes in a float32 artifact: codes, scales and zero points
    bits_per_weight 8 nbytes / number of weights
    """

    name: str
    format: str
    shape: tuple[int, int]
    weight_error: float
    output_error: float | None
    proxy_loss: float | None
    bits_per_weight: float
    nbytes: int


@dataclass(frozen=True)
class Report:
    """The result of `quantize_checkpoint`: a row per quantized weight, sizes before and after, and warnings."""

    scheme: Scheme
    method: str
    weights: tuple[WeightReport, ...]
    before: Sizes
    after: Sizes
    calibration_tokens: int
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "scheme": self.scheme.to_dict(),
            "method": self.method,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "calibration_tokens": self.calibration_tokens,
            "warnings": list(self.warnings),
            "weights": [asdict(weight) for weight in self.weights],
        }


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
