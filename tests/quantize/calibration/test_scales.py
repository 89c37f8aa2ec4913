"""Scales: the search against one group at a time in plain Python, the solution against least squares in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diffbit.formats import Format, QTensor, base, parse_format
from diffbit.quantize.calibration import scales
from diffbit.quantize.calibration.stats import proxy_loss

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
    assert proxy_loss(w, searched, diagonal) < most * proxy_loss(w, format.nearest(w, *format.fit(w)), diagonal)


QUICK = [
    "int2_g32", "int3_g64", "int4_g32", "int4", "int6_g32_s8", "int8", "int8_g32", "int2_g32_s8", "nl2_g32_s8",
    "nl3_g32_s8", "nl4_g64_s8", "int3_g32_asym", "int4_g64_asym", "nf4", "fp4", "mxfp4", "nvfp4",
]  # fmt: skip


def heavy(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Weights with as heavy tails as those of trained models, and columns of different size."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, columns, generator=generator).mul(0.4).exp()
    return 0.05 * torch.randn(rows, columns, generator=generator) * spread


def best_losses(w: Tensor, format: Format, h: Tensor, power: int) -> np.ndarray:
    """The least sum of powers of errors of each group over a fine grid of scales and zero points, in float64; scales
    are not rounded, except those of nvfp4, whose three bits the grid would beat."""
    size = format.group_size or w.shape[1]
    point = None if format.symmetric else torch.zeros(1, 1, dtype=torch.uint8)
    every = format.decode_each(torch.arange(format.codes)[None], torch.ones(1, 1), point)[0].double().unique().numpy()
    tables = every[None] - (np.arange(format.codes)[:, None] if not format.symmetric else 0.0)
    factors = np.linspace(0.3, 1.5, 121) if format.name != "mxfp4" else 2.0 ** np.arange(-2, 3)
    signs = (1, -1) if hasattr(format, "lowest") and format.symmetric else (1,)
    losses = np.empty((len(w), format.groups(w.shape[1])))
    fitted, rounded = format.fit(w)[0], format.stored if format.tensor_scaled else Tensor.clone
    near = np.stack([rounded(fitted * float(factor)).double().numpy() for factor in factors], -1)
    for row, scales_of in enumerate(near):
        for g, scales_near in enumerate(scales_of):
            group, weights = (x[g * size : (g + 1) * size].double().numpy() for x in (w[row], h))
            tried = (sign * scale * table for table in tables for sign in signs for scale in scales_near)
            losses[row, g] = min((weights * np.abs(group[:, None] - values).min(1) ** power).sum() for values in tried)
    return losses


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_search_is_nearly_the_best_of_a_fine_grid(name, weighted):
    format = parse_format(name)
    w = heavy(3, 192 if format.whole_groups else 168)  # a short last group
    h = torch.rand(w.shape[1], generator=torch.Generator().manual_seed(3)).square() if weighted else None
    weights, power = (torch.ones(w.shape[1]), 4) if h is None else (h, 2)

    def loss(scale: Tensor, zero: Tensor | None) -> float:
        return float(((format.nearest(w, scale, zero).dequantize() - w).double().abs().pow(power) * weights).sum())

    best = best_losses(w, format, weights, power).sum()
    slack = 1.5 if format.bits > 4 else 1.06  # with many levels luck has a part in a fine grid
    assert best * 0.99 <= loss(*scales.quick_search(w, format, h)) <= best * slack


@pytest.mark.parametrize(
    "name, most",
    [
        ("int2_g64", 0.7), ("int4_g32", 0.87), ("int4_g32_asym", 0.95), ("nf4", 0.64),
        ("nl2_g32_s8", 0.53), ("nl3_g32_s8", 0.72), ("nl4_g32_s8", 0.65),
    ],
)  # fmt: skip
def test_quick_search_errs_less_than_the_range(name, most):
    format, w = parse_format(name), heavy(64, 192)
    ours, of_range = (
        format.nearest(w, *found).dequantize() - w for found in (scales.quick_search(w, format), format.fit(w))
    )
    assert ours.pow(4).sum() < most * of_range.pow(4).sum()
    assert ours.square().sum() < of_range.square().sum()


@pytest.mark.parametrize("bits, most", [(2, 0.97), (3, 0.94), (4, 0.9)])
def test_levels_have_a_smaller_error_than_integers_of_the_same_size(bits, most):
    """Their signs matter: with the scale of the range, levels of 2 bits err more than integers."""
    w = heavy(64, 192)

    def error(name: str) -> float:
        format = parse_format(name)
        return float((format.nearest(w, *scales.quick_search(w, format)).dequantize() - w).square().sum())

    assert error(f"nl{bits}_g32_s8") < most * error(f"int{bits}_g32_s8")


@pytest.mark.parametrize("name", QUICK)
def test_no_row_errs_more_than_with_the_range(name):
    """Also where groups share the scale of a row, and where squares are too small or too large for float32."""
    format, w = parse_format(name), heavy(48, 192, seed=5)
    w[:16] *= torch.randn(16, 192, generator=torch.Generator().manual_seed(1)).mul(2).exp()
    w[16], w[17, :64], w[18:20], w[20:22] = 0, 0, w[18:20] * 1e-25, w[20:22] * 1e-7
    ours, range_ = (
        (format.nearest(w, *found).dequantize() - w).double().pow(4).sum(-1)
        for found in (scales.quick_search(w, format), format.fit(w))
    )
    assert (ours <= range_ * (1 + 1e-5)).all()


ON_GRID = [
    "int2_g32", "int3_g64", "int4_g32", "int4", "int5_g32_s8", "int8", "int2_g64_s8", "nl2_g32_s8", "nl3_g32_s8",
    "nl4_g32_s8", "int4_g32_asym", "nf4", "mxfp4", "nvfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", ON_GRID)
def test_weights_on_the_grid_come_back(name):
    """Such as those of a model that is quantized already. Up to 4 bits the largest weight of a group may be on any of
    the outer levels, with more on either end; all signs of scales occur."""
    format, generator = parse_format(name), torch.Generator().manual_seed(4)
    codes = torch.randint(0, format.codes, (40, 192), dtype=torch.uint8, generator=generator)
    scale = format.stored(
        0.01 * torch.rand(format.scale_shape((40, 192)), generator=generator).add(0.3)
        * torch.randn(format.scale_shape((40, 192)), generator=generator).sign()
    )  # fmt: skip
    zero = None if format.symmetric else torch.randint(0, format.codes, scale.shape, generator=generator).byte()
    size = format.group_size or 192
    if hasattr(format, "lowest") and format.symmetric:
        levels = format.decode_each(torch.arange(format.codes)[None], torch.ones(1, 1), None)[0]
        ends = [0, format.codes - 1] if format.bits > 4 else (levels.abs() >= -format.lowest / 2).nonzero().flatten()
        for g in range(0, 192, size):  # no larger weight than this one
            for row in range(40):
                most = int(ends[(row + g // size) % len(ends)])
                some = codes[row, g : g + size]
                some[levels[some.int()].abs() > levels[most].abs()] = most
                some[0] = most
    elif not format.symmetric:
        codes[:, ::size], codes[:, 1::size] = 0, format.codes - 1
    else:
        codes[:, ::size] = format.encode_each(torch.tensor(1e9), torch.ones(()), None).to(torch.uint8)
        scale = scale.abs()
    w = format.decode(codes, scale, zero)
    found, point = scales.quick_search(w, format)
    back = format.nearest(w, found, point).dequantize()
    torch.testing.assert_close(back, w, rtol=1e-6 if name.endswith(("s8", "4")) else 0, atol=0)


@pytest.mark.parametrize("name", QUICK)
def test_rows_are_searched_alone(name, monkeypatch):
    """So processes that share the rows of a weight find the same."""
    format, w, h = parse_format(name), heavy(50, 192), torch.rand(192)
    whole = scales.quick_search(w, format, h)
    monkeypatch.setattr(base, "BLOCK", 3 * 192)
    parts = [scales.quick_search(w[rows], format, h) for rows in (slice(0, 7), slice(7, 50))]
    for one, some in zip(whole, zip(*parts, strict=True), strict=True):
        assert one is None or torch.equal(one, torch.cat(some))


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
