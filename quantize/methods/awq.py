"""AWQ: channels that carry much are rounded finely, at the cost of those that carry little (arXiv 2306.00978).

A column of a weight that is multiplied by s > 1 before rounding and divided by it afterwards errs s times less, as long
as it does not stretch its group's range. The division goes into what makes the column's input (folding.py), so that it
is free: the norm before q, k and v and before gate and up, up_proj before down_proj, v_proj before o_proj. In diff_v1 a
norm of the heads stands between the last two, which scales do not pass: there o_proj stays as it is.

    s = x^alpha    or    s = x^alpha / w^(1 - alpha)            x = mean |input| of the channel over calibration tokens,
                                                                w = mean |weight| of the column, relative to its groups

the second as the paper's authors' code has it. alpha is searched for the least

    sum over the weights W of the group of  tr(D G D^T),   D = round(W s) / s - W,   G the Gram matrix of the input

with rounding to nearest. s = 1 is tried too: on calibration tokens rounding to nearest is never better. Ranges
are not clipped: that is for the method that rounds, "awq+clip" or "awq+gptq".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...processes import Processes
from ..folding import per_channel, scale_groups
from ..formats import Format
from ..layer import Layer
from ..states import ALONE
from ..stats import CalibStats

CALIBRATED = True
GRID = tuple(i / 20 for i in range(21))  # alpha
ROWS = 1024  # of each weight, evenly spread, that the search looks at: every row is an experiment of its own
SMALLEST = 1e-4  # x and w of a channel, relative to their mean, are no less: no channel is given up


def transform(layer: Layer) -> None:
    if layer.formats and layer.index >= 0:  # nothing comes before an embedding
        stats = layer.stats()
        scale_groups(layer, lambda first, w, f, channels: search(w, f, stats[first], channels, layer.here))


def search(
    weights: Sequence[Tensor],
    formats: Sequence[Format],
    stats: CalibStats,
    channels: Tensor | None = None,
    here: Processes = ALONE,
) -> Tensor:
    """Scales fp32 [C] for weights [N, K] that read the same input; channels as in folding.Group, default one each.

    here: the processes that share the search.
    """
    channels = torch.arange(weights[0].shape[1]) if channels is None else channels
    channels = channels.to(weights[0].device)
    samples = [weight[:: -(-len(weight) // ROWS)].float() for weight in weights]
    best, least = torch.ones(int(channels.max()) + 1, device=channels.device), torch.inf

    def loss_of(scale: Tensor) -> float:
        pairs = zip(samples, formats, strict=True)
        return sum(rounding_loss(weight, format, stats.gram, scale[channels]) for weight, format in pairs)

    scales = list(candidates(weights, formats, stats, channels))
    for scale, loss in zip(scales, here.share(scales, loss_of), strict=True):
        if loss < least:
            best, least = scale, loss
    return best


def candidates(
    weights: Sequence[Tensor], formats: Sequence[Format], stats: CalibStats, channels: Tensor
) -> Iterator[Tensor]:
    """The scales [C] of each alpha, those that are 1 first."""
    x = _bounded(per_channel(stats.mean_abs, channels))
    w = _bounded(per_channel(relative_magnitude(weights, formats), channels))
    for alpha in GRID:
        for scale in (x**alpha, x**alpha / w ** (1 - alpha)):
            yield scale / (scale.max() * scale.min()).sqrt()


def rounding_loss(weight: Tensor, format: Format, gram: Tensor, scale: Tensor) -> float:
    """tr(D G D^T) of a weight [N, K] that is multiplied by scale [K], rounded to nearest and divided by it again."""
    scaled = weight * scale
    difference = format.nearest(scaled, *format.fit(scaled)).dequantize() / scale - weight
    return float(((difference @ gram) * difference).sum(dtype=torch.float64))


def relative_magnitude(weights: Sequence[Tensor], formats: Sequence[Format]) -> Tensor:
    """fp32 [K]: the mean over all rows of |w| / (the largest |w| of its group)."""
    total, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for weight, format in zip(weights, formats, strict=True):
        grouped = format.grouped(weight.float().abs())  # [N, G, group]
        relative = grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-30)
        total += relative.flatten(1)[:, : weight.shape[1]].sum(0)
        rows += len(weight)
    return total / rows


def _bounded(values: Tensor) -> Tensor:
    return (values / values.mean().clamp(min=1e-30)).clamp(min=SMALLEST)
