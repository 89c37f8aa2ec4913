"""Reports on a quantized model: the error and the size of each weight, and the sizes of the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .scheme import Scheme
from .sizes import Sizes

REPORT_FILE = "quantization_report.json"  # in a quantized checkpoint


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
