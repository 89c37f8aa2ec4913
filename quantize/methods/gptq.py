"""GPTQ: each column compensates the rounding errors of those before it (arXiv 2210.17323); then all are refined.

A layer's error over its calibration tokens is, for each row w of the weight and its rounded q, with the Gram matrix H,

    (w - q) H (w - q)^T

What of H is noise of few tokens is taken out before (`CalibStats.shrunk`): where inputs are independent only its
diagonal is left, and GPTQ is a search for scales.

Columns are rounded one after the other, and later columns compensate the error of each optimally. The paper uses the
Cholesky factor of H^-1. Here H = R R^T with R upper triangular, which is equivalent without an inverse (arXiv
2307.13304, theorem 6): once the first columns of w are rounded, column k is moved to

    w_k + sum_{j<k} (w_j - q_j) R_jk / R_kk         and its rounding then adds  (R_kk error_k)^2  to the loss.

The most important columns come first (`act_order`: by decreasing diagonal of H), while many columns are left to
compensate them. Scales belong to groups of columns in the weight's order, so they are chosen before rounding,
weighted by the cost of an error after compensation: R_kk^2, not H_kk (`scales.search`). On SmolLM2's first layers that
lowers the loss by 0 to 17 % (q, k and v 7 to 17 %), and by more for inputs of low rank with independent outliers
(research/LOG.md).

This is greedy, because a column ignores those after it. So ROUNDS times, the scales are solved for with fixed codes
(`scales.solve`), and then every column is rounded again with all others fixed (`descend`: coordinate descent, arXiv
2309.01885). Neither step can increase the loss.

`DAMPING` times the mean of H's diagonal is added to the diagonal. With it, unused channels get plain rounding, and a
Gram matrix of fewer tokens than channels can be factorised; if it is not enough, it is increased tenfold.

Memory in addition to the weights: three matrices of K^2 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...formats import Format, QTensor
from ...io.errors import DiffbitError
from ..calibration import scales
from . import Method

DAMPING = 0.01
ROUNDS = 3
Encode = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # a column, scales and zero points, each [N] -> codes [N]
BLOCK = 128  # columns whose errors are propagated to the later ones in one product
PRECISE = 2048  # Gram matrices of up to so many columns are factorised in fp64


def quantize(weight: Tensor, format: Format, stats: Any, rounds: int = ROUNDS) -> QTensor:
    """Round weight [N, K] of any float dtype; stats: CalibStats of the layer's input."""
    if stats is None:
        raise DiffbitError("gptq needs calibration tokens; pass a text, such as --calibrate mix")
    weight = weight.float()
    if stats.gram not in _FEEDBACK:
        _FEEDBACK[stats.gram] = Feedback.from_gram(stats.shrunk())
    feedback = _FEEDBACK[stats.gram]
    scale, zero = scales.search(weight, format, feedback.cost)
    codes = round_columns(weight, format, scale, zero, feedback)
    for _ in range(rounds):
        scale = scales.solve(weight, format, codes, scale, zero, feedback.gram, damping(feedback.gram))
        codes = descend(weight, format, codes, scale, zero, feedback.gram)
    return QTensor(format, (weight.shape[0], weight.shape[1]), codes, scale, zero)


def quantize_large(weight: Tensor, format: Format, stats: Any) -> QTensor:
    """Round a part of a large table: without refinement, which takes most of the time and little of the loss."""
    return quantize(weight, format, stats, rounds=0)


def round_columns(
    weight: Tensor,
    format: Format,
    scale: Tensor,
    zero: Tensor | None,
    feedback: Feedback,
    encode: Encode | None = None,
) -> Tensor:
    """Return codes uint8 [N, K] of a weight [N, K] for scales and zero points shaped as `format.fit`'s.

    encode: rounds a column, by default to the nearest codes.
    """
    encode = encode or format.encode_column
    rows, columns = weight.shape
    order, factor = feedback.order, feedback.factor
    group = (order // (format.group_size or columns)).tolist()
    scale_of, zero_of = _columns(scale, zero, rows)
    source = weight.float().T[order]  # [K, N]: a column of the weight is a contiguous row
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    lost = torch.empty_like(source)  # w - q
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        moved = torch.addmm(source[start:end], factor[:start, start:end].T, lost[:start])
        for k in range(start, end):
            column = torch.addmv(moved[k - start], lost[start:k].T, factor[start:k, k])
            s, z = scale_of[group[k]], None if zero_of is None else zero_of[group[k]]
            codes[k] = encode(column, s, z)
            lost[k] = source[k] - format.decode_each(codes[k], s, z)
    result = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    result[:, order] = codes.T
    return result


def descend(
    weight: Tensor,
    format: Format,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    gram: Tensor,
    encode: Encode | None = None,
) -> Tensor:
    """Round each column once more, in turn, given all others, and return the codes. The target of q_k is

    q_k + sum_j (w_j - q_j) H_jk / H_kk
    """
    encode = encode or format.encode_column
    rows, columns = weight.shape
    added = damping(gram)
    width = format.group_size or columns
    scale_of, zero_of = _columns(scale, zero, rows)
    codes = codes.T.contiguous()  # [K, N]
    lost = (weight.float() - format.decode(codes.T, scale, zero)).T.contiguous()
    diagonal = (gram.diagonal() + added).tolist()
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        before = lost[start:end].clone()
        pull = torch.addmm(before, gram[start:end], lost, beta=added)
        change = torch.zeros_like(before)  # of `lost`, in this block
        for k in range(start, end):
            at = k - start
            s, z = scale_of[k // width], None if zero_of is None else zero_of[k // width]
            value = format.decode_each(codes[k], s, z)
            targets = torch.addmv(pull[at], change[:at].T, gram[start:k, k]).div_(diagonal[k]).add_(value)
            codes[k] = encode(targets, s, z)
            change[at] = value - format.decode_each(codes[k], s, z)
        lost[start:end] += change
    return codes.T.contiguous()


def damping(gram: Tensor) -> float:
    """Return the number to add to the diagonal; 1 for an all-zero matrix, which gives plain rounding."""
    return DAMPING * float(gram.diagonal().mean()) or 1.0


@dataclass(frozen=True, eq=False)
class Feedback:
    """The damped Gram matrix H = R R^T with its columns in rounding order.

    gram    fp32 [K, K], H without damping, in the weight's order
    order   int64 [K], the columns in the order in which they are rounded
    factor  fp32 [K, K], above the diagonal R_jk / R_kk, rows and columns in that order
    cost    fp32 [K], R_kk^2 of each column of the weight: the loss per squared error after compensation
    """

    gram: Tensor
    order: Tensor
    factor: Tensor
    cost: Tensor

    @classmethod
    def from_gram(cls, gram: Tensor) -> Feedback:
        order = gram.diagonal().argsort(descending=True, stable=True)
        backwards = order.flip(0)  # reversing the lower factor of the reversed matrix gives the upper factor
        matrix = gram[backwards[:, None], backwards].to(torch.float64 if len(gram) <= PRECISE else torch.float32)
        added = damping(gram)
        matrix.diagonal().add_(added)
        while True:
            lower, failed = torch.linalg.cholesky_ex(matrix)
            if not failed:
                break
            matrix.diagonal().add_(9 * added)
            added *= 10
        del matrix
        diagonal = lower.diagonal().clone()
        lower /= diagonal
        cost = torch.empty(len(gram), device=gram.device)
        cost[backwards] = diagonal.square().float()
        return cls(gram, order, lower.flip(0, 1).float(), cost)


# one per Gram matrix in use: q, k and v share one, gate and up share one, and so do all parts of a table
_FEEDBACK: MutableMapping[Tensor, Feedback] = WeakTensorKeyDictionary()


def _columns(scale: Tensor, zero: Tensor | None, rows: int) -> tuple[Tensor, Tensor | None]:
    """Transpose scales and zero points [N, G] to [G, N], so that those of a group of columns are contiguous."""
    return scale.expand(rows, -1).T.contiguous(), None if zero is None else zero.T.contiguous()


METHOD = Method("gptq", __doc__, round=quantize, round_large=quantize_large, calibrated=True)
