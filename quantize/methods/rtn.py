"""Round to nearest: rounds every weight to the nearest code of its group. No data, no search; the baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...formats import Format, QTensor
from . import Method


def quantize(weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """Round weight [N, K] of any float dtype; `stats` is not needed."""
    return format.nearest(weight, *format.fit(weight))


METHOD = Method("rtn", __doc__, round=quantize)
