"""GPTQ: every column is rounded knowing the errors of those before it (arXiv 2210.17323).

A layer's error over its calibration tokens is, for each row w of the weight and its rounded q, with the Gram matrix H,

    (w - q) H (w - q)^T

Columns are rounded one after the other; what a column loses is made up for by the columns still to come, in the one
best way. The paper writes that with the Cholesky factor of H^-1. Here it is H = R R^T with R upper triangular, which
says the same without an inverse (arXiv 2307.13304, theorem 6): the first columns of w, once rounded, move column k to

    w_k + sum_{j<k} (w_j - q_j) R_jk / R_kk         and its rounding then adds  (R_kk error_k)^2  to the loss.

Columns that matter most go first (`act_order`: by falling diagonal of H), when many are left that can make up for
them. Scales belong to groups of columns as they lie in the weight, so they are chosen before and stay.

`damping` times the mean of H's diagonal is added to the diagonal. That gives channels that calibration never saw plain
rounding, and factorises a Gram matrix of fewer tokens than channels; it grows tenfold where it does not suffice.

Memory beside the weights: two matrices of K^2 numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import DiffbitError
from .. import scales
from ..formats import Format
from ..qtensor import QTensor

CALIBRATED = True
DAMPING = 0.01
BLOCK = 128  # columns whose errors reach the later ones in one product
PRECISE = 2048  # columns up to which the factorisation is done in fp64


def quantize(weight: Tensor, format: Format, stats: Any) -> QTensor:
    """weight [N, K] of any float dtype, stats: CalibStats of the layer's input."""
    if stats is None:
        raise DiffbitError("gptq needs calibration tokens; name a text to take them from (--calibration stdlib)")
    weight = weight.float()
    scale, zero = scales.search(weight, format, stats.gram.diagonal())
    codes = round_columns(weight, format, scale, zero, stats.gram)
    return QTensor(format, (weight.shape[0], weight.shape[1]), codes, scale, zero)


def round_columns(
    weight: Tensor, format: Format, scale: Tensor, zero: Tensor | None, gram: Tensor, *, act_order: bool = True
) -> Tensor:
    """Codes uint8 [N, K] of a weight [N, K] under scales and zero points as `format.fit` shapes them, gram [K, K]."""
    rows, columns = weight.shape
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    factor = feedback(gram, order)
    group = order // (format.group_size or columns)
    step = scale.expand(rows, -1).T.contiguous()  # [G, N]; columns of the weight lie in rows here, one after the other
    point = None if zero is None else zero.T.contiguous()
    source = weight.float().T[order]  # [K, N]
    codes = torch.empty(columns, rows, dtype=torch.uint8)
    lost = torch.empty(columns, rows)  # w - q
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        moved = torch.addmm(source[start:end], factor[:start, start:end].T, lost[:start])
        for k in range(start, end):
            column = torch.addmv(moved[k - start], lost[start:k].T, factor[start:k, k])
            g = group[k]
            code = format.encode_each(column, step[g], None if point is None else point[g])
            codes[k] = code.to(torch.uint8)
            lost[k] = source[k] - format.decode_each(codes[k], step[g], None if point is None else point[g])
    result = torch.empty(rows, columns, dtype=torch.uint8)
    result[:, order] = codes.T
    return result


def feedback(gram: Tensor, order: Tensor, damping: float = DAMPING) -> Tensor:
    """fp32 [K, K]: above the diagonal R_jk / R_kk of the damped Gram matrix with its columns in this order."""
    columns = len(gram)
    backwards = order.flip(0)  # the lower factor of the reversed matrix, reversed, is the upper one
    matrix = gram[backwards][:, backwards].to(torch.float64 if columns <= PRECISE else torch.float32)
    mean = float(matrix.diagonal().mean())
    if not mean > 0:
        return torch.eye(columns)
    added = 0.0
    while True:
        matrix.diagonal().add_(damping * mean - added)
        added = damping * mean
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            break
        damping *= 10
    lower /= lower.diagonal().clone()
    return lower.flip(0, 1).float()
