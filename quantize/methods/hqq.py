"""Half-quadratic quantization (Badri and Shaji, mobiusml.github.io/hqq_blog): no data, robust to large weights.

A group's scale s and zero point z minimise, over its weights w, a norm that tolerates a few large errors:

    argmin over (s, z)  sum_k |w_k - s (q_k - z)|^p        q = encode(w; s, z), p = 0.7

A separate variable e for the errors is tied to w - s (q - z) by a quadratic penalty of weight beta, and the parts are
solved in turn while beta grows (its eq. 3 to 5):

    q <- encode(w; s, z)
    e <- shrink(w - s (q - z)),     shrink(x) = sign(x) max(|x| - |x|^(p-1) / beta, 0)
    z <- round(mean(q - (w - e) / s))                       with a zero point
    s <- sum (w - e) (q - z) / sum (q - z)^2

p, beta and its growth are the authors'. Two things differ. The authors solve for a float z and keep the full range's s;
diffbit's formats have integer zero points or none, so s is solved for too (with a codebook's values in place of q - z).
But then s may clip the largest weights: p < 1 tolerates that, but a model does not if these weights read its few large
channels. So each group keeps the iterate, or the full range, with the least sum of fourth powers of errors. On
SmolLM2's first layers at 3 bits, choosing by squares doubled the loss of rounding to nearest in some layers; choosing
by fourth powers loses at most 1.35 times as much and 4 % less on average; the authors' code at most 1.4 times and 1 %
less (research/LOG.md). Calibrated methods are better.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats import Format, QTensor
from ...io.errors import DiffbitError
from . import Method

P = 0.7
BETA, GROWTH = 10.0, 1.01
ITERATIONS = 20


def quantize(weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """Round weight [N, K] of any float dtype; `stats` is not needed."""
    if format.per_tensor:
        raise DiffbitError(f"hqq fits a scale to each group, but {format} has one scale per weight matrix; use gptq")
    weight = weight.float()
    scale, zero = format.fit(weight)
    real = format.grouped(torch.ones(1, weight.shape[1], device=weight.device))[0]  # [G, group]; 0: padding
    for rows, s, z, (part,) in format.by_rows(scale, zero, weight):
        scales, zeros = _solve(part, real, format, s, z)
        scale[rows] = scales[..., 0]
        if zero is not None and zeros is not None:
            zero[rows] = zeros[..., 0]
    return format.nearest(weight, format.stored(scale), zero)


def _solve(
    weight: Tensor, real: Tensor, format: Format, scale: Tensor, zero: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Improve scale and zero [n, G, 1] for weight [n, G, group]."""
    best_scale, best_zero, best = scale, zero, torch.full_like(scale, torch.inf)
    beta = BETA
    for _ in range(ITERATIONS):
        codes = format.encode_each(weight, scale, zero)
        lost = weight - format.decode_each(codes, scale, zero)
        loss = (lost.square().square() * real).sum(-1, keepdim=True)
        better = loss < best
        if not better.any():
            break
        best = torch.where(better, loss, best)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
        target = weight - shrink(lost, beta)  # w - e, which scale and zero point are fitted to
        if zero is not None:
            middle = ((codes - target / scale.masked_fill(scale == 0, torch.inf)) * real).sum(-1, keepdim=True)
            middle /= real.sum(-1, keepdim=True)
            zero = middle.round().clamp(0, 2**format.bits - 1).to(torch.uint8)
        value = format.decode_each(codes, torch.ones_like(scale), zero) * real
        new = (target * value).sum(-1, keepdim=True) / value.square().sum(-1, keepdim=True).clamp(min=1e-30)
        scale = torch.where(new * scale > 0, format.stored(new), scale)
        beta *= GROWTH
    return best_scale, best_zero


def shrink(x: Tensor, beta: float) -> Tensor:
    """Return approximately the argmin over e of |e|^p + beta/2 (e - x)^2: generalised soft thresholding."""
    magnitude = x.abs()
    return x.sign() * (magnitude - magnitude.clamp(min=1e-6).pow(P - 1) / beta).clamp_(min=0)


METHOD = Method("hqq", __doc__, round=quantize, alone=True)
