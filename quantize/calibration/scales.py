"""Finds the scales of least error, before codes are chosen and after.

`search`: a group's largest weights are rare; clipping them rounds all others more finely, which helps more the fewer
the bits. From a format's candidates for scales and zero points it keeps, per group,

    argmin over (s, z)  sum_k h_k (w_k - decode(encode(w_k; s, z); s, z))^2

where h_k, the importance of an input channel, is the diagonal of the Gram matrix (or 1 without calibration): the
expected squared error of the output if errors of different channels were independent. Then it tries scales a little
smaller and larger than the best.

`refit`: with the codes fixed, the best scale of a group by the same error is a weighted least-squares solution,

    s = sum_k h_k u_k w_k / sum_k h_k u_k^2        u_k: the value of the code at scale 1

`solve`: with the codes of a row fixed, its dequantized weights are linear in its scales s [G], and the row's error

    (w - C s)^T H (w - C s)        C [K, G]: the value of each code at scale 1, in the column of its group

with the Gram matrix H is smallest if C^T H C s = C^T H w: a small linear system per row, for all its groups at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

from ...formats import Format

FINE = (0.98, 1.02)  # factors of the best candidate, half a step of `Format.factors`
ALIVE = 1e-3  # smallest importance, relative to the mean, so that a group of unused channels has a scale too


def search(weight: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points, shaped as `format.fit`'s, for weight [N, K] and importance [K] >= 0."""
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    weighting = _weighting(format, importance)
    return least(weight, format, lambda lost: (lost.square_() * weighting).sum(-1))


def _weighting(format: Format, importance: Tensor) -> Tensor:
    """Return importance [K], relative to its mean, as [G, group]."""
    importance = importance.float() / importance.float().mean().clamp(min=torch.finfo(torch.float32).tiny) + ALIVE
    return format.grouped(importance[None])[0]


@torch.no_grad()
def refit(weight: Tensor, format: Format, codes: Tensor, scale: Tensor, zero: Tensor | None, h: Tensor) -> Tensor:
    """Return the scales of least error for given codes and importance h [K]; old ones if the new have the other
    sign."""
    weighting = _weighting(format, h)
    along, norm = torch.zeros(2, len(weight), format.groups(weight.shape[1]), device=weight.device)
    for rows, s, z, (part, code) in format.by_rows(scale, zero, weight, codes):
        unit = format.decode_each(code, torch.ones_like(s), z)
        along[rows] = (unit * weighting * part.float()).sum(-1)
        norm[rows] = (unit * weighting * unit).sum(-1)
    if scale.shape != along.shape:  # one scale for all
        along, norm = along.sum().view(1, 1), norm.sum().view(1, 1)
    return format.stored(torch.where(along * scale > 0, along / norm, scale))


def least(weight: Tensor, format: Format, error: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Choose from `format.fit` and the candidates, group by group, the least error(lost [n, G, group]) -> [n, G]."""

    def loss(scale: Tensor, zero: Tensor | None) -> Tensor:  # shaped as the scales
        total = torch.empty(len(weight), format.groups(weight.shape[1]), device=weight.device)
        for rows, s, z, (part,) in format.by_rows(scale, zero, weight):
            part = part.float()
            total[rows] = error(format.decode_each(format.encode_each(part, s, z), s, z).sub_(part))
        return total if scale.shape == total.shape else total.sum().view(1, 1)

    def fine() -> Iterator[tuple[Tensor, Tensor | None]]:
        middle = best_scale, best_zero
        for factor in FINE:
            yield format.stored(factor * middle[0]), middle[1]

    best_scale, best_zero = format.fit(weight)
    best = loss(best_scale, best_zero)
    for scale, zero in chain(format.candidates(weight), fine()):
        losses = loss(scale, zero)
        better = losses < best
        best, best_scale = torch.where(better, losses, best), torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return format.stored(best_scale), best_zero  # groups of different candidates may not have one scale of their row


def solve(
    weight: Tensor, format: Format, codes: Tensor, scale: Tensor, zero: Tensor | None, gram: Tensor, ridge: float
) -> Tensor:
    """Return the scales of least error for given codes; `ridge` is added to the diagonal of gram [K, K].

    A row keeps its scales if rounding the new ones to the file's type would increase its error; so do all-zero groups.
    """
    columns = weight.shape[1]
    groups, width = format.groups(columns), format.group_size or columns
    solved = scale.expand(len(weight), groups).clone()
    matrix = vector = torch.zeros((), dtype=torch.float64)
    some = max(1, columns * columns // (groups * groups))  # rows whose systems are no larger than the Gram matrix
    for start in range(0, len(weight), some):
        rows = slice(start, start + some)
        old = solved[rows].double()  # [n, G]
        unit = format.decode(codes[rows], torch.ones_like(solved[rows]), None if zero is None else zero[rows])
        normal = old.new_empty(len(old), groups, groups)  # C^T H C, symmetric
        for g, first in enumerate(range(0, columns, width)):
            product = unit[:, first : first + width] @ gram[first : first + width, first:]
            normal[:, g, g:] = _group_sums(format, product.mul_(unit[:, first:]))
            normal[:, g:, g] = normal[:, g, g:]
        normal.diagonal(dim1=1, dim2=2).add_(ridge * _group_sums(format, unit * unit))
        target = weight[rows].float()
        vectors = _group_sums(format, (target @ gram).add_(target, alpha=ridge) * unit)  # C^T H w [n, G]
        if scale.shape[0] == 1 and len(weight) > 1:  # one scale for all
            matrix, vector = matrix + normal.sum(0), vector + vectors.sum(0)
            continue
        solved[rows] = _solution(format, normal, vectors, old).float()
    if scale.shape[0] == 1 and len(weight) > 1:
        return _solution(format, matrix[None], vector[None], scale.double()).float()
    return solved


def _solution(format: Format, normal: Tensor, vector: Tensor, old: Tensor) -> Tensor:
    """Solve normal [n, G, G] s = vector [n, G] in fp64; returns `old` where the solution is no better."""
    slack = 1e-7 * normal.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny  # [n, 1]
    regular = normal + torch.diag_embed(slack.expand_as(old))
    new = torch.linalg.solve(regular, vector + slack * old)
    new = torch.where(new * old > 0, new, old)  # keeps signs: codebooks have no negative scales; 0 of an empty group
    new = format.stored(new.float()).double()

    def loss(s: Tensor) -> Tensor:
        return (s * (torch.einsum("ngh,nh->ng", normal, s) - 2 * vector)).sum(-1, keepdim=True)

    return torch.where(loss(new) <= loss(old), new, old)


def _group_sums(format: Format, values: Tensor) -> Tensor:
    """Sum [n, K] over each group; returns fp64 [n, G]."""
    return format.grouped(values).sum(-1).double()  # summing in fp64 takes three times as long
