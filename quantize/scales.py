"""Scales and zero points that err least, instead of those that reach the largest weight.

A group's largest weights are rare; giving up their exactness buys finer steps for all others, and the fewer the bits
the more that is worth. `search` tries, for each group of K' weights w, scales around those of `format.fit` and keeps

    argmin over (s, z)  sum_k h_k (w_k - decode(encode(w_k; s, z); s, z))^2

where h_k, the importance of an input channel, is the diagonal of the Gram matrix (or 1 without calibration): the
expected squared error of the output if errors of different channels were independent.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .formats import Format, IntFormat, _to_half, row_blocks

FACTORS = tuple(x / 100 for x in range(100, 30, -4))  # of the range; the search's grid


def search(weight: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """weight [N, K], importance [K] -> scale fp32 and zero uint8 or None, shaped as `format.fit` gives them."""
    best_scale, best_zero = format.fit(weight)
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    importance = importance.float()
    # an unused channel still has a say, or a group of such would have none at all
    importance = importance / importance.mean().clamp(min=1e-30) + 1e-3
    best = error(weight, format, best_scale, best_zero, importance)
    for scale, zero in candidates(weight, format):
        loss = error(weight, format, scale, zero, importance)
        better = loss < best
        best = torch.where(better, loss, best)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def candidates(weight: Tensor, format: Format) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales and zero points to try, for all groups at once."""
    scale, zero = format.fit(weight)
    if zero is not None:
        assert isinstance(format, IntFormat)
        top = 2**format.bits - 1
        for low in FACTORS[::2]:
            for high in FACTORS[::2]:
                below, above = -scale * zero * low, scale * (top - zero.float()) * high
                step = _to_half((above - below) / top)
                place = (-below / step.masked_fill(step == 0, torch.inf)).round().clamp(0, top)
                yield step, place.to(torch.uint8)
        return
    for factor in FACTORS:
        for sign in (1, -1):
            candidate = scale * (factor * sign)
            yield (_to_half(candidate) if format.scale_dtype == torch.float16 else candidate), None


def error(weight: Tensor, format: Format, scale: Tensor, zero: Tensor | None, importance: Tensor) -> Tensor:
    """Weighted squared error of each group, shaped as the scales."""
    total = torch.zeros(len(weight), format.groups(weight.shape[1]), device=weight.device)
    weighting = format._grouped(importance[None])[0]  # [G, group]
    for rows in row_blocks(weight):
        grouped = format._grouped(weight[rows].float())
        step = scale.expand(len(weight), -1)[rows, :, None]
        point = None if zero is None else zero[rows, :, None]
        back = format.decode_each(format.encode_each(grouped, step, point), step, point)
        total[rows] = (back.sub_(grouped).square_() * weighting).sum(-1)
    return total if scale.shape == total.shape else total.sum().view(1, 1)
