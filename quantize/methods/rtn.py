"""Round to nearest: every weight to the nearest code of its group. No data, no search; the yardstick of all methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..formats import Format, QTensor

CALIBRATED = False


def quantize(weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """weight [N, K] of any float dtype -> QTensor; `stats` (what calibration gathered for this layer) is not needed."""
    return format.nearest(weight, *format.fit(weight))
