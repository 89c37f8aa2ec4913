"""GPTQ against the textbook: one column after the other, with the inverse of what is left, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffbit.formats import Format, QTensor, parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize.calibration import scales
from diffbit.quantize.calibration.stats import CalibStats, Gatherer, proxy_loss
from diffbit.quantize.methods import gptq, rtn

FORMATS = ["int8", "int4_g32_asym", "int3_g64", "int2", "nf4", "mxfp4", "nvfp4", "ternary"]


def layer(
    rows: int = 24, columns: int = 192, tokens: int = 600, seed: int = 0, outliers: bool = False
) -> tuple[Tensor, CalibStats]:
    """A weight, and the statistics of inputs as layers have them: correlated, of very different sizes, not centred.

    outliers: 3 % of the channels are thirty times larger and rise and fall together, as in trained models.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = normal(tokens, columns // 4) @ normal(columns // 4, columns) + 2 * normal(tokens, columns)
    inputs = (inputs + normal(columns)) * normal(columns).mul(0.8).exp()
    if outliers:
        large = torch.randperm(columns, generator=generator)[: round(0.03 * columns)]
        inputs[:, large] += 30 * inputs.std() * (1 + normal(tokens, 1)) * normal(len(large)).sign()
    gatherer = Gatherer()
    gatherer.add(inputs)
    return normal(rows, columns) * normal(rows, 1).mul(0.3).exp() * 0.05, gatherer.stats()


def textbook(
    weight: Tensor, format: Format, scale: Tensor, zero: Tensor | None, gram: Tensor, order: list[int]
) -> Tensor:
    """Optimal brain quantization (arXiv 2208.11580) in a given order: round column k, spread its error, forget it."""
    w, columns = weight.double(), weight.shape[1]
    hessian = gram.double() + gptq.DAMPING * gram.double().diagonal().mean() * torch.eye(columns, dtype=torch.double)
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for index, k in enumerate(order):
        left = order[index:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        group = k // (format.group_size or columns)
        step, point = scale.expand(len(w), -1)[:, group], None if zero is None else zero[:, group]
        codes[:, k] = format.encode_each(w[:, k].float(), step, point).to(torch.uint8)
        error = w[:, k] - format.decode_each(codes[:, k], step, point)
        w[:, left] -= error[:, None] * inverse[0] / inverse[0, 0]
    return codes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outliers", [False, True])
def test_it_is_the_textbook(name, outliers):
    format = parse_format(name)
    columns = 192 if parse_format(name).whole_groups else 200  # 200: a short last group
    weight, stats = layer(columns=columns, outliers=outliers)
    scale, zero = format.fit(weight)
    order = sorted(range(columns), key=lambda k: -stats.gram[k, k])
    feedback = gptq.Feedback.from_gram(stats.gram)
    codes = gptq.round_columns(weight, format, scale, zero, feedback)
    expected = textbook(weight, format, scale, zero, stats.gram, order)
    assert (codes != expected).float().mean() < 1e-3  # a tie may fall either way


def test_column_cost_matches_textbook_formula():
    _, stats = layer(columns=64, outliers=True)
    feedback = gptq.Feedback.from_gram(stats.gram)
    damped = stats.gram.double() + gptq.damping(stats.gram) * torch.eye(64, dtype=torch.double)
    order = feedback.order.tolist()
    expected = [1 / torch.linalg.inv(damped[order[i:]][:, order[i:]])[0, 0] for i in range(64)]
    torch.testing.assert_close(feedback.cost[order].double(), torch.stack(expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.9), ("int4_g128", 0.8), ("int3_g64", 0.95), ("int2_g64", 0.9)])
def test_with_outlier_channels_it_beats_a_search_by_the_diagonal(name, most, monkeypatch):
    format = parse_format(name)
    weight, stats = layer(64, 256, 20000, outliers=True)
    ours = proxy_loss(weight, gptq.quantize(weight, format, stats), stats.gram)
    search = scales.search
    monkeypatch.setattr(scales, "search", lambda weight, format, _: search(weight, format, stats.gram.diagonal()))
    assert ours < most * proxy_loss(weight, gptq.quantize(weight, format, stats), stats.gram)


def loss(weight: Tensor, back: Tensor, gram: Tensor) -> Tensor:
    """(w - q) H (w - q)^T of each row, H damped."""
    damped = gram.double() + gptq.DAMPING * gram.double().diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    difference = weight.double() - back.double()
    return ((difference @ damped) * difference).sum(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_descent_matches_the_slow_version_and_lowers_the_error(name):
    """Each column in turn to the code of least loss, the others as they are: every code is tried."""
    format = parse_format(name)
    weight, stats = layer(8, columns=192 if parse_format(name).whole_groups else 200)
    scale, zero = format.fit(weight)
    start = gptq.round_columns(weight, format, scale, zero, gptq.Feedback.from_gram(stats.gram))
    improved = gptq.descend(weight, format, start, scale, zero, stats.gram)
    assert (improved != start).any() or format.bits == 8
    before, after = (loss(weight, format.decode(codes, scale, zero), stats.gram) for codes in (start, improved))
    assert (after <= before * (1 + 1e-6)).all()
    damped = stats.gram.double() + gptq.damping(stats.gram) * torch.eye(len(stats.gram), dtype=torch.double)
    slow, back = start.clone(), format.decode(start, scale, zero).double()
    for k in range(weight.shape[1]):
        codes = torch.arange(format.codes, dtype=torch.uint8)
        group = k // (format.group_size or weight.shape[1])
        step = scale.expand(len(weight), -1)[:, group, None]
        point = None if zero is None else zero[:, group, None]
        values = format.decode_each(codes.expand(len(weight), -1), step, point).double()  # [N, codes]
        pull = (weight.double() - back) @ damped[:, k]
        moves = values - back[:, k, None]
        best = (damped[k, k] * moves.square() - 2 * pull[:, None] * moves).argmin(-1)
        slow[:, k], back[:, k] = codes[best], values[torch.arange(len(weight)), best]
    assert (improved != slow).float().mean() < 2e-3  # a tie may fall either way


@pytest.mark.parametrize(
    ("name", "least"),
    [("int4_g128", 4), ("int3_g64", 4), ("int2_g64", 4), ("nf4", 4), ("mxfp4", 4), ("nvfp4", 4), ("ternary", 2)],
)
def test_it_beats_rounding_to_nearest(name, least):
    format = parse_format(name)
    weight, stats = layer(64, 256, 2000)
    nearest, ours = rtn.quantize(weight, format), gptq.quantize(weight, format, stats)
    assert proxy_loss(weight, ours, stats.gram) * least < proxy_loss(weight, nearest, stats.gram)
    feedback = gptq.Feedback.from_gram(stats.shrunk())
    scale, zero = scales.search(weight, format, feedback.cost)
    greedy = QTensor(format, (64, 256), gptq.round_columns(weight, format, scale, zero, feedback), scale, zero)
    assert proxy_loss(weight, ours, feedback.gram) < 0.98 * proxy_loss(weight, greedy, feedback.gram)


@pytest.mark.parametrize("name", ["int4_g32_asym", "nf4", "ternary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype_is_its_float32_values(name, dtype):
    weight, stats = layer(8, 128, 200)
    weight = weight.to(dtype)
    rounded = gptq.quantize(weight, parse_format(name), stats)
    expected = gptq.quantize(weight.float(), parse_format(name), stats)
    assert torch.equal(rounded.codes, expected.codes) and torch.equal(rounded.scale, expected.scale)


def test_dead_channels_are_rounded_to_nearest_and_change_nothing():
    format = parse_format("int4_g32")
    weight, stats = layer(8, 128)
    alive = torch.ones(128)
    alive[[3, 64, 127]] = 0
    gram = stats.gram * alive * alive[:, None]
    scale, zero = format.fit(weight)
    codes = gptq.round_columns(weight, format, scale, zero, gptq.Feedback.from_gram(gram))
    assert torch.equal(codes[:, alive == 0], format.encode(weight, scale, zero)[:, alive == 0])
    changed = weight.clone()
    changed[:, 3] = 0
    again = gptq.round_columns(changed, format, scale, zero, gptq.Feedback.from_gram(gram))
    assert torch.equal(again[:, alive == 1], codes[:, alive == 1])


@pytest.mark.parametrize("name", ["int4_g64", "int2_g64_asym", "ternary"])
def test_no_signal_at_all_is_rounding_to_nearest(name):
    format = parse_format(name)
    weight, _ = layer(8, 128)
    scale, zero = format.fit(weight)
    codes = gptq.round_columns(weight, format, scale, zero, gptq.Feedback.from_gram(torch.zeros(128, 128)))
    assert torch.equal(codes, format.encode(weight, scale, zero))
    silent = CalibStats(torch.zeros(128, 128), torch.zeros(128), torch.zeros(128), 0)
    assert gptq.quantize(weight, format, silent).dequantize().isfinite().all()


@pytest.mark.parametrize(("tokens", "most"), [(1, 0.1), (40, 0.5)])
def test_fewer_tokens_than_channels(tokens, most):
    weight, stats = layer(8, 128, tokens)
    format = parse_format("int3_g32")
    ours, nearest = gptq.quantize(weight, format, stats), rtn.quantize(weight, format)
    assert proxy_loss(weight, ours, stats.gram) < most * proxy_loss(weight, nearest, stats.gram)


@pytest.mark.parametrize("tokens", [100, 1000])
@pytest.mark.parametrize(("rank", "most"), [(0, 1.01), (16, 0.2)])
def test_on_other_tokens_it_is_as_good_as_the_search(tokens, rank, most):
    """Also where the inputs have no correlations, and the tokens are fewer than the channels."""
    generator = torch.Generator().manual_seed(0)
    weight, mix = torch.randn(64, 192, generator=generator), torch.randn(rank, 192, generator=generator)
    inputs = torch.randn(tokens, rank, generator=generator) @ mix + torch.randn(tokens, 192, generator=generator)
    gatherer = Gatherer()
    gatherer.add(inputs)
    stats, format = gatherer.stats(), parse_format("int4_g32")
    true = mix.T @ mix + torch.eye(192)
    searched = format.nearest(weight, *scales.search(weight, format, stats.gram.diagonal()))
    ours = gptq.quantize(weight, format, stats)
    assert proxy_loss(weight, ours, true) < most * proxy_loss(weight, searched, true)


def test_damping_grows_until_it_factorises():
    gram = torch.eye(64) - 0.5 * torch.ones(64, 64)  # an eigenvalue of -31
    assert gptq.Feedback.from_gram(gram).factor.isfinite().all()


def test_wide_layers_are_factorised_in_single_precision(monkeypatch):
    weight, stats = layer(16, 256, 2000)
    format = parse_format("int3_g64")
    precise = proxy_loss(weight, gptq.quantize(weight, format, stats), stats.gram)
    monkeypatch.setattr(gptq, "PRECISE", 0)
    single = gptq.quantize(weight, format, replace(stats, gram=stats.gram.clone()))
    assert proxy_loss(weight, single, stats.gram) < 1.01 * precise


def test_one_factorisation_serves_every_part_of_a_table(monkeypatch):
    weight, stats = layer(64, 96, 400)
    calls, from_gram = [], gptq.Feedback.from_gram
    monkeypatch.setattr(gptq.Feedback, "from_gram", lambda gram: calls.append(gram) or from_gram(gram))
    whole = gptq.quantize(weight, parse_format("int4_g32"), replace(stats, gram=stats.gram.clone()))
    parts = [gptq.quantize(rows, parse_format("int4_g32"), stats) for rows in weight.split(16)]
    assert len(calls) == 2
    torch.testing.assert_close(QTensor.stack(parts).dequantize(), whole.dequantize())


def test_without_calibration_it_says_what_it_needs():
    with pytest.raises(DiffbitError, match="gptq needs calibration"):
        gptq.quantize(torch.zeros(2, 64), parse_format("int4_g32"), None)
