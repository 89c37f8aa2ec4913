"""Round to nearest: rounds every weight to the nearest code of its group; with text, scales by the size of its inputs.

The scales are the best of a search (`scales.quick_search`): with text those of the least squared error, each input
channel weighted by its mean square over the text (an importance matrix), without text those of the least fourth powers:

    s = argmin sum_k h_k (w_k - q_k(s))^2,    h_k = mean x_k^2        or        s = argmin sum_k (w_k - q_k(s))^4

h is measured in the float model, in one pass, so this takes a third of GPTQ's time (SmolLM2-135M). A format that a
model was trained in keeps the scales of its range, and so do 8 bits without text, where a search gains little. Weights
that lie on the grid of a format of fewer bits come back as they are.
"""

from __future__ import annotations

from torch import Tensor

from ...formats import Format, QTensor
from ..calibration.scales import quick_search
from . import Method

PLAIN_BITS = 8  # from which on the scales of the range suffice


def quantize(weight: Tensor, format: Format, importance: Tensor | None = None) -> QTensor:
    """Round weight [N, K] of any float dtype; importance: the mean square of each input channel, fp32 [K]."""
    is_plain = format.trained or (format.bits >= PLAIN_BITS and importance is None)
    scale, zero = format.fit(weight) if is_plain else quick_search(weight, format, importance)
    return format.nearest(weight, scale, zero)


METHOD = Method("rtn", __doc__, round=quantize, reads="squares")
