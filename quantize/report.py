"""Reports on a quantized model: the error and the size of each weight, and the sizes of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .scheme import Scheme
from .sizes import Sizes

REPORT_FILE = "quantization_report.json"  # in a quantized checkpoint
SHOWN = 3  # weights, formats or warnings in a report's repr


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

    @property
    def error(self) -> float:
        """Return the error of its outputs, or without calibration its own."""
        return self.weight_error if self.output_error is None else self.output_error


@dataclass(frozen=True, repr=False)
class Report:
    """The result of `quantize_checkpoint`: a row per quantized weight, sizes before and after, and warnings.

    Its repr is three lines: what was done, the size before and after, and the warnings or else the largest errors.
    """

    scheme: Scheme
    method: str
    weights: tuple[WeightReport, ...]
    before: Sizes
    after: Sizes
    calibration_tokens: int
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return f"{self._what()}\n{self._size()}\n{self._worst()}"

    def _what(self) -> str:
        counts = Counter(weight.format for weight in self.weights).most_common()
        formats = [f"{'all' if len(counts) == 1 else count} to {format}" for format, count in counts]
        text = f" on {self.calibration_tokens:,} tokens of text" if self.calibration_tokens else ""
        weights = f"{len(self.weights)} weights rounded by {self.method}{text}: {_some(formats)}"
        attention = self.scheme.attention.describe()
        parts = [weights if self.weights else "no weights rounded", f"attention: {attention}" if attention else ""]
        return "; ".join(filter(None, parts))

    def _size(self) -> str:
        before, after = self.before, self.after
        size = f"{before.nbytes / 1e6:,.2f} MB -> {after.nbytes / 1e6:,.2f} MB of weights"
        return f"{size}, {before.bits_per_weight:.2f} -> {after.bits_per_weight:.2f} bits per weight"

    def _worst(self) -> str:
        if self.warnings:
            return f"warnings: {_some(self.warnings, '; ')}"
        if not self.weights:
            cache = self.before.kv_bytes_per_1k_tokens, self.after.kv_bytes_per_1k_tokens
            return f"{cache[0]:,} -> {cache[1]:,} bytes of KV cache per 1000 tokens"
        worst = sorted(self.weights, key=lambda weight: -weight.error)[:SHOWN]
        kind = "output" if worst[0].output_error is not None else "weight"
        errors = ", ".join(f"{weight.name.removeprefix('model.')} {weight.error:.2%}" for weight in worst)
        return f"largest {kind} errors: {errors}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "scheme": self.scheme.to_dict(),
            "method": self.method,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "calibration_tokens": self.calibration_tokens,
            "warnings": list(self.warnings),
            "weights": [asdict(weight) for weight in self.weights],
        }


def _some(texts: Sequence[str], separator: str = ", ") -> str:
    more = len(texts) - SHOWN
    return separator.join([*texts[:SHOWN], *([f"and {more} more"] if more > 0 else [])])
