"""Scales: the search against one group at a time in plain Python, the solution against least squares in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diffbit.formats import Format, QTensor, parse_format
from diffbit.quantize.calibration import scales
from diffbit.quantize.calibration.stats import proxy_loss
from diffbit.quantize.methods.rtn import quantize as rtn

FORMATS = ["int8", "int4_g32_asym", "int3_g64", "int2_g16", "int2", "nf4", "ternary"]


def weight(rows: int = 6, columns: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def gram(columns: int = 192, tokens: int = 500, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, 24, generator=generator) @ torch.randn(24, columns, generator=generator)
    inputs += 2 * torch.randn(tokens, columns, generator=generator) + torch.randn(columns, generator=generator)
    inputs *= torch.randn(columns, generator=generator).exp()
    return inputs.T @ inputs / tokens


def group_loss(w: list[float], format: Format, scale: float, zero: int | None, h: list[float]) -> float:
    """sum h (w - q)^2 of one group, from the docstring of formats.py."""
    total = 0.0
    for value, importance in zip(w, h, strict=True):
        if format.name == "nf4":
            back = min((abs(value - scale * c), scale * c) for c in format.codebook)[1]
        else:
            middle = (1 if format.name == "ternary" else 2 ** (format.bits - 1)) if zero is None else zero
            top = 2 if format.name == "ternary" else 2**format.bits - 1
            code = min(max(round(value / scale) + middle, 0), top)
            back = scale * (code - middle)
        total += importance * (value - back) ** 2
    return total


@pytest.mark.parametrize("name", FORMATS)
def test_search_is_the_best_of_its_grid(name):
    format = parse_format(name)
    columns = 192 if name == "nf4" else 168  # a short last group
    w = weight(3, columns)
    h = gram(columns).diagonal()
    scale, zero = scales.search(w, format, h)
    h = (h / h.mean() + scales.ALIVE).tolist()
    tried = [format.fit(w), *format.candidates(w)]
    size = format.group_size or columns

    def loss(s: Tensor, z: Tensor | None, row: int, g: int) -> float:
        group = slice(g * size, (g + 1) * size)
        point = None if z is None else int(z[row, g])
        return group_loss(w[row, group].tolist(), format, float(s[row, g]), point, h[group])

    if format.name == "ternary":  # one scale for all rows
        ours, best = (
            min(sum(group_loss(r, format, float(s), None, h) for r in w.tolist()) for s, _ in some)
            for some in ([(scale, zero)], tried)
        )
        assert ours <= best * (1 + 1e-4)
        return
    for row in range(3):
        for g in range(scale.shape[1]):
            best = min(loss(s, z, row, g) for s, z in tried)
            assert loss(scale, zero, row, g) <= best * (1 + 1e-4)
            near = [(format.stored(f * s), z) for s, z in tried for f in (1, *scales.FINE)]
            assert any(s[row, g] == scale[row, g] and (z is None or z[row, g] == zero[row, g]) for s, z in near)


@pytest.mark.parametrize(
    ("name", "most"), [("int4_g128", 0.85), ("int3_g64", 0.75), ("int2_g64", 0.45), ("int2_g64_asym", 0.5)]
)
def test_search_errs_less_than_the_full_range(name, most):
    format = parse_format(name)
    w, h = weight(64, 256), gram(256)
    scale, zero = scales.search(w, format, h.diagonal())
    searched = QTensor(format, (64, 256), format.encode(w, scale, zero), scale, zero)
    diagonal = torch.diag(h.diagonal())
    assert proxy_loss(w, searched, diagonal) < most * proxy_loss(w, rtn(w, format), diagonal)


@pytest.mark.parametrize("name", FORMATS)
def test_refit_is_solve_with_a_diagonal(name):
    format = parse_format(name)
    w, h = weight(columns=192 if name == "nf4" else 168), gram(192 if name == "nf4" else 168).diagonal()
    w[2, :64] = 0
    scale, zero = format.fit(w)
    codes = format.encode(w, scale, zero)
    refitted = scales.refit(w, format, codes, scale, zero, h)
    expected = scales.solve(w, format, codes, scale, zero, torch.diag(h / h.mean()), scales.ALIVE)
    torch.testing.assert_close(refitted, expected, rtol=1e-3, atol=0)  # fp16


@pytest.mark.parametrize("name", FORMATS)
def test_solve_is_least_squares(name):
    format = parse_format(name)
    columns = 192 if name == "nf4" else 168
    w, h, ridge = weight(5, columns), gram(columns), 0.3
    scale, zero = format.fit(w)
    codes = format.encode(w, scale, zero)
    solved = scales.solve(w, format, codes, scale, zero, h, ridge)
    root = np.linalg.cholesky(h.double().numpy() + ridge * np.eye(columns)).T  # H = root^T root
    unit = format.decode(codes, torch.ones_like(scale), zero).double().numpy()
    size, wide = format.group_size or columns, w.double().numpy()
    if format.name == "ternary":
        design, target = (unit @ root.T).reshape(-1, 1), (wide @ root.T).reshape(-1)
        expected = np.linalg.lstsq(design, target, rcond=None)[0]
        np.testing.assert_allclose(solved.numpy()[0], expected, rtol=1e-4)
        return
    for row in range(5):
        members = np.arange(columns)[:, None] // size == np.arange(scale.shape[1])
        expected = np.linalg.lstsq(root @ (unit[row][:, None] * members), root @ wide[row], rcond=None)[0]
        np.testing.assert_allclose(solved[row].numpy(), expected, rtol=2e-3)  # fp16


@pytest.mark.parametrize("name", FORMATS)
def test_solve_never_errs_more(name):
    format = parse_format(name)
    w, h = weight(16), gram()
    w[3, 64:128] = 0
    w[5] = 0
    scale, zero = scales.search(w, format, h.diagonal())
    codes = format.encode(w, scale, zero)
    solved = scales.solve(w, format, codes, scale, zero, h, 0.1)
    assert torch.equal(format.stored(solved), solved)
    before, after = (
        ((difference @ (h + 0.1 * torch.eye(192))) * difference).sum(-1)
        for difference in (w - format.decode(codes, s, zero) for s in (scale, solved))
    )
    if format.name == "ternary":
        before, after = before.sum(), after.sum()
    assert (after <= before * 1.0001).all()
    assert after.sum() < 0.99 * before.sum() or format.bits == 8


def test_solve_in_chunks_of_rows_is_the_same():
    format = parse_format("int3_g16")
    w, h = weight(40, 64), gram(64)
    scale, zero = format.fit(w)
    codes = format.encode(w, scale, zero)
    whole = scales.solve(w[:10], format, codes[:10], scale[:10], zero, h, 0.1)
    solved = scales.solve(w.repeat(30, 1), format, codes.repeat(30, 1), scale.repeat(30, 1), zero, h, 0.1)
    assert len(solved) > 64 * 64 // 4**2  # several chunks
    torch.testing.assert_close(solved[:10], whole, rtol=1e-3, atol=0)
    torch.testing.assert_close(solved[-40:], solved[:40], rtol=1e-3, atol=0)


def test_channels_that_are_never_used_get_a_scale():
    format = parse_format("int3_g64")
    w = weight()
    importance = torch.ones(192)
    importance[:64] = 0
    scale, _ = scales.search(w, format, importance)
    assert (scale != 0).all()
    scale, _ = scales.search(w, format, torch.zeros(192))
    assert torch.equal(scale, scales.search(w, format)[0])
