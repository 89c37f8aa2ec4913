"""Half-quadratic quantization (Badri and Shaji, mobiusml.github.io/hqq_blog): no data, robust to large weights.

A group's scale s and zero point z are to minimise, over its weights w, a norm that forgives the few large errors:

    argmin over (s, z)  sum_k |w_k - s (q_k - z)|^p        q = encode(w; s, z), p = 0.7

The errors get a variable of their own, e, held to w - s (q - z) by a quadratic with weight beta, and the parts are
solved in turn while beta grows (its eq. 3 to 5):

    q <- encode(w; s, z)
    e <- shrink(w - s (q - z)),     shrink(x) = sign(x) max(|x| - |x|^(p-1) / beta, 0)
    z <- round(mean(q - (w - e) / s))                       with a zero point
    s <- sum (w - e) (q - z) / sum (q - z)^2

p, beta and its growth are the authors'. Two things are not. There z is a float and s stays that of the full range; our
formats have whole zero points or none, so s is what is solved for (with a codebook's values in the place of q - z). And
s may then cut off the largest weights, which p < 1 forgives and a model does not where they read its few large
channels: so of all iterates, the full range among them, each group keeps the one of least sum of fourth powers. By
squares SmolLM2's first layers lost twice what rounding to nearest loses at 3 bits, by fourth powers at most 1.35 times
and 4 % less in the mean; the authors' code, 1.4 times and 1 % less (docs/LOG.md). Calibrated methods know better.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import DiffbitError
from ..formats import Format, QTensor, row_blocks

CALIBRATED = False
P = 0.7
BETA, GROWTH = 10.0, 1.01
ITERATIONS = 20


def quantize(weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """weight [N, K] of any float dtype -> QTensor; `stats` is not needed."""
    if format.per_tensor:
        raise DiffbitError(f"hqq fits scales to groups of weights, but {format} has one for a whole weight; use gptq")
    weight = weight.float()
    scale, zero = format.fit(weight)
    real = format.grouped(torch.ones(1, weight.shape[1], device=weight.device))[0]  # [G, group]; 0: filling
    for rows in row_blocks(weight):
        zeros = None if zero is None else zero[rows, :, None]
        found, zeros = _solve(format.grouped(weight[rows]), real, format, scale[rows, :, None], zeros)
        scale[rows] = found[..., 0]
        if zero is not None and zeros is not None:
            zero[rows] = zeros[..., 0]
    return format.nearest(weight, scale, zero)


def _solve(
    weight: Tensor, real: Tensor, format: Format, scale: Tensor, zero: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """weight [n, G, group], scale and zero [n, G, 1] -> better ones."""
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
        kept = weight - shrink(lost, beta)  # w - e
        if zero is not None:
            middle = ((codes - kept / scale.masked_fill(scale == 0, torch.inf)) * real).sum(-1, keepdim=True)
            middle /= real.sum(-1, keepdim=True)
            zero = middle.round().clamp(0, 2**format.bits - 1).to(torch.uint8)
        value = format.decode_each(codes, torch.ones_like(scale), zero) * real
        new = (kept * value).sum(-1, keepdim=True) / value.square().sum(-1, keepdim=True).clamp(min=1e-30)
        scale = torch.where(new * scale > 0, format.stored(new), scale)
        beta *= GROWTH
    return best_scale, best_zero


def shrink(x: Tensor, beta: float) -> Tensor:
    """argmin over e of |e|^p + beta/2 (e - x)^2, nearly: generalised soft thresholding."""
    magnitude = x.abs()
    return x.sign() * (magnitude - magnitude.clamp(min=1e-6).pow(P - 1) / beta).clamp_(min=0)
