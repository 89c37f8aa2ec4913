"""Round to nearest after clipping: of a few smaller ranges per group, the one with the least squared error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats import Format, QTensor
from . import Method

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def quantize(weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """weight [N, K] -> QTensor; the zero points stay those of the whole range."""
    scale, zero = format.fit(weight)
    best = torch.full(scale.shape, torch.inf)
    chosen = scale.clone()
    for shrink in SHRINK:
        candidate = (scale * shrink).half().float()
        error = weight.float() - format.decode(format.encode(weight, candidate, zero), candidate, zero)
        error = error.square().unflatten(1, (scale.shape[1], -1)).sum(-1)  # [N, G]: groups must be whole
        chosen, best = torch.where(error < best, candidate, chosen), torch.minimum(error, best)
    return QTensor(format, (weight.shape[0], weight.shape[1]), format.encode(weight, chosen, zero), chosen, zero)


METHOD = Method("clipped", __doc__, round=quantize)
