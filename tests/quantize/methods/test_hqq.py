"""HQQ against its formulas, one group at a time in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diffbit.formats import Format, QTensor, parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize.methods import hqq

FORMATS = ["int8_g64", "int4_g32_asym", "int4", "int2_g64", "nf4"]


def weight(rows: int = 4, columns: int = 192, seed: int = 0) -> Tensor:
    """Rows of different sizes, with the heavy tails of trained weights."""
    generator = torch.Generator().manual_seed(seed)
    gamma = torch.randn(rows, columns, 4, generator=generator).square().mean(-1)
    w = torch.randn(rows, columns, generator=generator) / gamma.sqrt()  # Student's t, 4 degrees of freedom
    return w * 0.05 * torch.randn(rows, 1, generator=generator).mul(0.5).exp()


def by_range(w: Tensor, format: Format) -> QTensor:
    return format.nearest(w, *format.fit(w))


def half(x: float) -> float:
    return float(np.float16(np.float32(x)))


def slow(w: list[float], format: Format, scale: float, zero: int | None) -> tuple[float, int | None]:
    """The docstring's four lines for one group, float64."""
    best, kept, beta = np.inf, (scale, zero), hqq.BETA
    middle = 2 ** (format.bits - 1)
    for _ in range(hqq.ITERATIONS):
        if format.name == "nf4":
            values = [min((abs(x / scale - c), c) for c in format.codebook)[1] for x in w]
        else:
            z = middle if zero is None else zero
            codes = [min(max(round(x / scale) + z, 0), 2**format.bits - 1) for x in w]
            values = [c - z for c in codes]
        errors = [x - scale * v for x, v in zip(w, values, strict=True)]
        loss = sum(e**4 for e in errors)
        if loss < best:
            best, kept = loss, (scale, zero)
        targets = []
        for x, e in zip(w, errors, strict=True):
            shrunk = max(abs(e) - max(abs(e), 1e-6) ** (hqq.P - 1) / beta, 0.0)
            targets.append(x - np.sign(e) * shrunk)
        if zero is not None:
            zero = round(sum(c - t / scale for c, t in zip(codes, targets, strict=True)) / len(w))
            zero = min(max(zero, 0), 2**format.bits - 1)
            values = [c - zero for c in codes]
        new = sum(t * v for t, v in zip(targets, values, strict=True)) / max(sum(v * v for v in values), 1e-30)
        new = half(new) if format.name.startswith("int") else new
        scale = new if new * scale > 0 else scale
        beta *= hqq.GROWTH
    return kept


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_slow_version(name):
    """Up to ties: a scale that fp32 rounds to the other fp16 neighbour may lead to another optimum, about as good."""
    format = parse_format(name)
    columns = 192 if name == "nf4" else 168  # a short last group
    w = weight(4, columns)
    w[1:3] += 0.1  # where the zero point is no middle code
    w[2:] *= 20  # errors beyond the threshold of shrink
    start, zeros = format.fit(w)
    start, zeros = start.clone(), None if zeros is None else zeros.clone()
    rounded = hqq.quantize(w, format)
    size, same, losses = format.group_size or columns, [], []
    for row in range(4):
        for g in range(start.shape[1]):
            group = w[row, g * size : (g + 1) * size].tolist()
            point = None if zeros is None else int(zeros[row, g])
            scale, zero = slow(group, format, float(start[row, g]), point)
            same.append(
                float(rounded.scale[row, g]) == pytest.approx(scale, rel=1e-5)
                and (zero is None or (rounded.zero is not None and int(rounded.zero[row, g]) == zero))
            )
            one = torch.tensor([[scale]]), None if zero is None else torch.tensor([[zero]], dtype=torch.uint8)
            codes = format.encode_each(w[row : row + 1, g * size : (g + 1) * size], *one)
            slow_loss = (format.decode_each(codes, *one) - w[row, g * size : (g + 1) * size]).pow(4).sum()
            errors = rounded.dequantize()[row, g * size : (g + 1) * size] - w[row, g * size : (g + 1) * size]
            losses.append((float(errors.pow(4).sum()), float(slow_loss)))
    assert np.mean(same) >= 0.7, same
    assert all(errors < 1.25 * slow_loss for errors, slow_loss in losses), losses


@pytest.mark.parametrize(
    ("name", "most"),
    [("int4_g128", 0.95), ("int3_g64", 0.9), ("int2_g64", 0.87), ("int2_g64_asym", 0.8), ("int4", 0.9), ("nf4", 0.97)],
)
def test_it_beats_rounding_to_nearest(name, most):
    format = parse_format(name)
    w = weight(64, 256)
    ours, nearest = hqq.quantize(w, format).dequantize(), by_range(w, format).dequantize()
    assert (w - ours).square().sum() < most * (w - nearest).square().sum()


@pytest.mark.parametrize("name", ["int4_g128", "int3_g64", "int2_g64_asym"])
def test_weights_that_read_outlier_channels_are_not_cut_off(name):
    """3 % of the inputs are thirty times larger, and the weights that read them are the largest of their groups. The
    least squared error of the weights cuts them off, and loses 0.97 to 1.13 times what rounding to nearest does."""
    format = parse_format(name)
    w = weight(64, 256)
    large = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:8]
    w[:, large] = w.abs().unflatten(1, (-1, 64)).amax(-1)[:, large // 64] * w[:, large].sign()
    carried = torch.ones(256)
    carried[large] = 30

    def lost(back: Tensor) -> float:
        return float(((w - back) * carried).square().sum())

    assert lost(hqq.quantize(w, format).dequantize()) < 0.95 * lost(by_range(w, format).dequantize())


def test_large_errors_are_let_go():
    """What lies beyond the threshold is not followed: sizes of 0.17 and more, with the authors' beta of 10."""
    x = torch.tensor([-3.0, -0.05, 0.0, 0.15, 0.2, 3.0])
    shrunk = hqq.shrink(x, 10.0)
    assert torch.equal(shrunk == 0, torch.tensor([False, True, True, True, False, False]))
    assert shrunk[5] == pytest.approx(3 - 3**-0.3 / 10) and shrunk[0] == -shrunk[5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype_is_its_float32_values(dtype):
    w = weight().to(dtype)
    rounded, expected = hqq.quantize(w, parse_format("int3_g64")), hqq.quantize(w.float(), parse_format("int3_g64"))
    assert torch.equal(rounded.codes, expected.codes) and torch.equal(rounded.scale, expected.scale)


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_zeros_stay_zeros(name):
    w = weight()
    w[1] = 0
    w[2, :64] = 0
    back = hqq.quantize(w, parse_format(name)).dequantize()
    assert back.isfinite().all() and (back[1] == 0).all()


def test_ternary_is_refused():
    with pytest.raises(DiffbitError, match="ternary has one scale per weight matrix"):
        hqq.quantize(weight(), parse_format("ternary"))
