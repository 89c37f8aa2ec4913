"""GPTQ: every column is rounded knowing the errors of those before it (arXiv 2210.17323); then all are looked at again.

A layer's error over its calibration tokens is, for each row w of the weight and its rounded q, with the Gram matrix H,

    (w - q) H (w - q)^T

Columns are rounded one after the other; what a column loses is made up for by the columns still to come, in the one
best way. The paper writes that with the Cholesky factor of H^-1. Here it is H = R R^T with R upper triangular, which
says the same without an inverse (arXiv 2307.13304, theorem 6): the first columns of w, once rounded, move column k to

    w_k + sum_{j<k} (w_j - q_j) R_jk / R_kk         and its rounding then adds  (R_kk error_k)^2  to the loss.

Columns that matter most go first (`act_order`: by falling diagonal of H), when many are left that can make up for
them. Scales belong to groups of columns as they lie in the weight, so they are chosen before, and by what an error
will cost once later columns make up for it: R_kk^2, not H_kk (`scales.search`). On SmolLM2's first layers that loses 0
to 17 % less (q, k and v 7 to 17 %), on inputs of low rank with independent outliers more (docs/LOG.md).

That is greedy: a column knows nothing of those after it. So each of ROUNDS times the scales are solved for with the
codes as they are (`scales.solve`), and then every column is rounded again, given all the others (`descend`: coordinate
descent, arXiv 2309.01885). Neither can make the loss larger.

`DAMPING` times the mean of H's diagonal is added to the diagonal. That gives channels that calibration never saw plain
rounding, and factorises a Gram matrix of fewer tokens than channels; it grows tenfold where it does not suffice.

Memory beside the weights: two matrices of K^2 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import DiffbitError
from .. import scales
from ..formats import Format, QTensor

CALIBRATED = True
DAMPING = 0.01
ROUNDS = 3
Encode = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # a column, scales and zero points, each [N] -> codes [N]
BLOCK = 128  # columns whose errors reach the others in one product
PRECISE = 2048  # columns up to which the factorisation is done in fp64


def quantize(weight: Tensor, format: Format, stats: Any) -> QTensor:
    """weight [N, K] of any float dtype, stats: CalibStats of the layer's input."""
    if stats is None:
        raise DiffbitError("gptq needs calibration tokens; name a text to take them from (--calibrate mix)")
    weight = weight.float()
    if stats.gram not in _FEEDBACK:
        _FEEDBACK[stats.gram] = Feedback.of(stats.gram)
    feedback = _FEEDBACK[stats.gram]
    scale, zero = scales.search(weight, format, feedback.cost)
    codes = round_columns(weight, format, scale, zero, feedback)
    for _ in range(ROUNDS):
        scale = scales.solve(weight, format, codes, scale, zero, stats.gram, damping(stats.gram))
        codes = descend(weight, format, codes, scale, zero, stats.gram)
    return QTensor(format, (weight.shape[0], weight.shape[1]), codes, scale, zero)


def round_columns(
    weight: Tensor,
    format: Format,
    scale: Tensor,
    zero: Tensor | None,
    feedback: Feedback,
    encode: Encode | None = None,
) -> Tensor:
    """Codes uint8 [N, K] of a weight [N, K] under scales and zero points as `format.fit` shapes them.

    encode: rounds a column, by default to the nearest codes.
    """
    encode = encode or format.encode_each
    rows, columns = weight.shape
    order, factor = feedback.order, feedback.factor
    group = (order // (format.group_size or columns)).tolist()
    scale_of, zero_of = _columns(scale, zero, rows)
    source = weight.float().T[order]  # [K, N]: columns of the weight lie in rows, one after the other
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
    """Codes after each column, in turn, was rounded once more to what suits all the others best: q_k moves towards

    q_k + sum_j (w_j - q_j) H_jk / H_kk
    """
    encode = encode or format.encode_each
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
            wanted = torch.addmv(pull[at], change[:at].T, gram[start:k, k]).div_(diagonal[k]).add_(value)
            codes[k] = encode(wanted, s, z)
            change[at] = value - format.decode_each(codes[k], s, z)
        lost[start:end] += change
    return codes.T.contiguous()


def damping(gram: Tensor) -> float:
    """What is added to the diagonal; 1 where there is no signal at all, which makes rounding plain."""
    return DAMPING * float(gram.diagonal().mean()) or 1.0


@dataclass(frozen=True, eq=False)
class Feedback:
    """The damped Gram matrix with its columns in the order of their rounding, as H = R R^T.

    order   int64 [K], the column that comes first, second, ...
    factor  fp32 [K, K], above the diagonal R_jk / R_kk, rows and columns in that order
    cost    fp32 [K], R_kk^2 of each column of the weight: what a squared error of it costs at last
    """

    order: Tensor
    factor: Tensor
    cost: Tensor

    @classmethod
    def of(cls, gram: Tensor, *, act_order: bool = True) -> Feedback:
        columns = torch.arange(len(gram), device=gram.device)
        order = gram.diagonal().argsort(descending=True, stable=True) if act_order else columns
        backwards = order.flip(0)  # the lower factor of the reversed matrix, reversed, is the upper one
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
        return cls(order, lower.flip(0, 1).float(), cost)


# of the Gram matrices that are alive: q, k and v share one, gate and up, and all rows of a table, which come in parts
_FEEDBACK: MutableMapping[Tensor, Feedback] = WeakTensorKeyDictionary()


def _columns(scale: Tensor, zero: Tensor | None, rows: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points [N, G] as [G, N], those of a group of columns side by side."""
    return scale.expand(rows, -1).T.contiguous(), None if zero is None else zero.T.contiguous()
