"""Finds the scales of least error, before codes are chosen and after.

`search`: a group's largest weights are rare; clipping them rounds all others more finely, which helps more the fewer
the bits. From a format's candidates for scales and zero points it keeps, per group,

    argmin over (s, z)  sum_k h_k (w_k - decode(encode(w_k; s, z); s, z))^2

where h_k, the importance of an input channel, is the diagonal of the Gram matrix (or 1 without calibration): the
expected squared error of the output if errors of different channels were independent. Then it tries scales a little
smaller and larger than the best.

`quick_search`, which rounding to nearest uses: nearly the same error in a fraction of the time. It tries few candidates
(`Format.few_candidates`), all of them on some rows that stay in the cache. Then, in turn, it rounds and solves for the
scale: with the codes fixed, the best scale of a group is a weighted least-squares solution,

    s = sum_k h_k u_k w_k / sum_k h_k u_k^2        u_k: the value of the code at scale 1

Without importance it takes the sum of the fourth powers of errors, as HQQ does, each step with their squares as h.
A group's largest weights often read the largest inputs. Squares alone clip them: SmolLM2 in int3_g64 then loses more
than with scales of the range (KL 2.03, 1.60 and, by fourth powers, 1.58), while its levels gain by both (nl3_g32_s8:
1.02 by squares, 1.27 and 1.07).

`solve`: with the codes of a row fixed, its dequantized weights are linear in its scales s [G], and the row's error

    (w - C s)^T H (w - C s)        C [K, G]: the value of each code at scale 1, in the column of its group

with the Gram matrix H is smallest if C^T H C s = C^T H w: a small linear system per row, for all its groups at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ...formats import Format, divisor, row_blocks

FINE = (0.98, 1.02)  # factors of the best candidate, half a step of `Format.factors`
REFITS = 2  # of a quick search
CODED_REFITS = 6  # where only codes tell a scale's error; 12 lessen it by another 2 %
ALIVE = 1e-3  # smallest importance, relative to the mean, so that a group of unused channels has a scale too


def search(weight: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points, shaped as `format.fit`'s, for weight [N, K] and importance [K] >= 0."""
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    weighting = _weighting(format, importance)
    if format.by_columns:
        return _coded_search(weight.float(), format, weighting), None
    return least(weight, format, lambda lost: (lost.square_() * weighting).sum(-1))


def quick_search(weight: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points, shaped as `search`'s; no row has a larger error than with `format.fit`'s."""
    if format.per_tensor or format.by_columns:
        return search(weight, format, importance)
    rows, columns = weight.shape
    format.check((rows, columns))
    weighting = None
    if importance is not None or columns % (format.group_size or columns):  # the weighting of padding is 0
        ones = torch.ones(columns, device=weight.device)
        weighting = _weighting(format, ones if importance is None else importance)
    scale = torch.empty(format.scale_shape((rows, columns)), device=weight.device)
    zero = None if format.symmetric else torch.empty_like(scale, dtype=torch.uint8)
    blocks, weight = list(row_blocks(weight)), weight.detach()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # blocks are too small for torch's own threads
        search_block = partial(_quick_search, format=format, weighting=weighting, weighed=importance is not None)
        for block, result in zip(blocks, pool.map(lambda block: search_block(weight[block]), blocks), strict=True):
            scale[block], points = result
            if zero is not None and points is not None:
                zero[block] = points
    return scale, zero


def _coded_search(weight: Tensor, format: Format, weighting: Tensor) -> Tensor:
    """Encode and solve for the scales in turn: each step lessens the error; weighting [G, group]. The best of several
    scales of a group cannot be told, because its codes also depend on other groups' scales."""
    scale, _ = format.fit(weight)
    for _ in range(CODED_REFITS):
        unit = format.decode(format.encode(weight, scale, None), torch.ones_like(scale), None)
        fitted = scale.clone()
        for rows in row_blocks(weight):
            w, q = format.grouped(weight[rows]), format.grouped(unit[rows])
            along, norm = (weighting * w * q).sum(-1), (weighting * q * q).sum(-1)
            fitted[rows] = torch.where(along > 0, along / norm, scale[rows])
        scale = format.stored(fitted)
    return scale


def _quick_search(
    weight: Tensor, format: Format, weighting: Tensor | None, weighed: bool
) -> tuple[Tensor, Tensor | None]:
    """Search for all groups of a weight [n, K] at once; weighting [G, group], or None.

    weighed: it is an importance, not only 0 for padding.
    """
    weight = weight.float()
    part = format.grouped(weight)  # [n, G, group]

    def total(products: Tensor) -> Tensor:
        return (products if weighting is None else products.mul_(weighting)).sum(-1)  # [n, G]

    def values(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weight at scale 1, and the nearest values."""
        place = part / divisor(scale)[..., None]
        return place, format.values_each(place, None if zero is None else zero[..., None])

    def loss(scale: Tensor, zero: Tensor | None) -> Tensor:
        place, value = values(scale, zero)
        squares, unit = value.sub_(place).square_(), scale.square()
        return total(squares) * unit if weighed else total(squares.square_()) * unit.square()

    def refit(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Solve for the scale of the nearest codes; with a zero point, for the line of the weights over the codes."""
        place, value = values(scale, zero)
        h = torch.ones_like(place) if weighed else (value - place).square_()  # of fourth powers: h times squares
        along, norm = total(h * place * value), total(h * value * value)
        if zero is not None:
            count, places, sum_of_values = total(h.clone()), total(h * place), total(h * value)
            slope = (count * along - sum_of_values * places) / (count * norm - sum_of_values.square())
            shift = ((sum_of_values - places / slope) / count).nan_to_num_(0, 0, 0)
            moved = (zero + shift).round_().clamp_(0, format.codes - 1)
            change = zero - moved  # of all values
            along, norm = along + change * places, norm + change * (2 * sum_of_values + change * count)
            zero = moved.to(torch.uint8)
        step = 1 if weighed else 1 / 3  # Newton's, of fourth powers
        return format.stored(torch.where(along > 0, (1 + step * (along / norm - 1)) * scale, scale)), zero

    fitted, best_zero = format.fit(weight)
    fitted_zero, best = best_zero, fitted
    least_loss = fitted_loss = loss(fitted, best_zero)
    for scale, zero in format.few_candidates(weight):
        losses = loss(scale, zero)
        better = losses < least_loss
        least_loss, best = torch.where(better, losses, least_loss), torch.where(better, scale, best)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    best = format.stored(best)
    least_loss = loss(best, best_zero)
    for _ in range(REFITS):
        scale, zero = refit(best, best_zero)
        losses = loss(scale, zero)
        better = losses < least_loss
        best = format.stored(torch.where(better, scale, best))
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
        least_loss = loss(best, best_zero)
    worse = least_loss.sum(-1, keepdim=True) > fitted_loss.sum(-1, keepdim=True)  # groups of a row may share a scale
    best = torch.where(worse, fitted, best)
    if best_zero is not None and fitted_zero is not None:
        best_zero = torch.where(worse, fitted_zero, best_zero)
    return best, best_zero


def _weighting(format: Format, importance: Tensor) -> Tensor:
    """Return importance [K], relative to its mean, as [G, group]."""
    importance = importance.float() / importance.float().mean().clamp(min=torch.finfo(torch.float32).tiny) + ALIVE
    return format.grouped(importance[None])[0]


def least(weight: Tensor, format: Format, error: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Choose from `format.fit` and the candidates, group by group, the least error(lost [n, G, group]) -> [n, G]."""

    def loss(scale: Tensor, zero: Tensor | None) -> Tensor:  # shaped as the scales
        total = torch.empty(len(weight), format.groups(weight.shape[1]), device=weight.device)
        codes = format.encode(weight, scale, zero) if format.by_columns else None
        for rows, s, z, (part,) in format.by_rows(scale, zero, weight):
            part = part.float()
            found = format.encode_each(part, s, z) if codes is None else format.grouped(codes[rows])
            total[rows] = error(format.decode_each(found, s, z).sub_(part))
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
    count = max(1, columns * columns // (groups * groups))  # rows whose systems are no larger than the Gram matrix
    for start in range(0, len(weight), count):
        rows = slice(start, start + count)
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
