"""AWQ: rounds channels with large activations more finely, at the cost of those with small ones (arXiv 2306.00978).

If a column of a weight is multiplied by s > 1 before rounding and divided by s afterwards, its error is s times
smaller, as long as it does not extend its group's range. The division is free, because it is folded into the module
that computes the column's input (_folding.py): the norm before q, k and v and before gate and up, up_proj before
down_proj, v_proj before o_proj. In diff_v1 the head norm is between the last two. Scales do not pass through a norm, so
o_proj is not scaled.

    s = x^alpha    or    s = x^alpha / w^(1 - alpha)            x = mean |input| of the channel over calibration tokens,
                                                                w = mean |weight| of the column, relative to its groups

The second form is from the paper authors' code. The search chooses the form and the alpha with the least

    sum over the weights W of the group of  tr(D G D^T),   D = round(W s) / s - W,   G the Gram matrix of the input

with rounding to nearest. It also tries s = 1, so it is never worse than rounding to nearest on the calibration tokens.
It does not clip ranges; that is left to the method that rounds, as in "awq+clip" or "awq+gptq".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...formats import Format
from ...io.processes import Processes
from ..calibration import ALONE, CalibStats
from ..calibration.passes import Passes
from ..layer import Layer
from . import Method
from ._folding import per_channel, scale_groups

ALPHAS = tuple(i / 20 for i in range(21))  # alpha
ROWS = 1024  # evenly spread rows of each weight that the search uses
SMALLEST = 1e-4  # lower bound of x and w of a channel, relative to their mean, so that no channel is scaled to zero


def transform(layer: Layer, passes: Passes) -> None:
    if layer.formats and layer.index >= 0:  # an embedding has no module before it
        stats = passes.stats()
        scale_groups(layer, lambda first, w, f, channels: search(w, f, stats[first], channels, passes.workers))


def search(
    weights: Sequence[Tensor],
    formats: Sequence[Format],
    stats: CalibStats,
    channels: Tensor | None = None,
    workers: Processes = ALONE,
) -> Tensor:
    """Return scales fp32 [C] for weights [N, K] that read the same input.

    channels: as in folding.Group; default: one per column. workers: the processes that share the search.
    """
    channels = torch.arange(weights[0].shape[1]) if channels is None else channels
    channels = channels.to(weights[0].device)
    samples = [weight[:: -(-len(weight) // ROWS)].float() for weight in weights]
    best, least = torch.ones(int(channels.max()) + 1, device=channels.device), torch.inf

    def loss_of(scale: Tensor) -> float:
        pairs = zip(samples, formats, strict=True)
        return sum(rounding_loss(weight, format, stats.gram, scale[channels]) for weight, format in pairs)

    scales = list(candidates(weights, formats, stats, channels))
    for scale, loss in zip(scales, workers.share(scales, loss_of), strict=True):
        if loss < least:
            best, least = scale, loss
    return best


def candidates(
    weights: Sequence[Tensor], formats: Sequence[Format], stats: CalibStats, channels: Tensor
) -> Iterator[Tensor]:
    """Yield the scales [C] of each alpha, starting with all ones."""
    x = _bounded(per_channel(stats.mean_abs, channels))
    w = _bounded(per_channel(relative_magnitude(weights, formats), channels))
    for alpha in ALPHAS:
        for scale in (x**alpha, x**alpha / w ** (1 - alpha)):
            yield scale / (scale.max() * scale.min()).sqrt()


def rounding_loss(weight: Tensor, format: Format, gram: Tensor, scale: Tensor) -> float:
    """Return tr(D G D^T) of a weight [N, K] that is multiplied by scale [K], rounded to nearest and divided by it."""
    scaled = weight * scale
    difference = format.nearest(scaled, *format.fit(scaled)).dequantize() / scale - weight
    return float(((difference @ gram) * difference).sum(dtype=torch.float64))


def relative_magnitude(weights: Sequence[Tensor], formats: Sequence[Format]) -> Tensor:
    """Return the mean over all rows of |w| / (the largest |w| of its group), fp32 [K]."""
    total, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for weight, format in zip(weights, formats, strict=True):
        grouped = format.grouped(weight.float().abs())  # [N, G, group]
        relative = grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-30)
        total += relative.flatten(1)[:, : weight.shape[1]].sum(0)
        rows += len(weight)
    return total / rows


def _bounded(values: Tensor) -> Tensor:
    return (values / values.mean().clamp(min=1e-30)).clamp(min=SMALLEST)


METHOD = Method("awq", __doc__, transform=transform, calibrated=True)
