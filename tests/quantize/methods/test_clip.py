"""Clipping against the tokens themselves, what it gains, odd shapes."""

from __future__ import annotations

import pytest
import torch

from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize.calibration.stats import Gatherer, proxy_loss
from diffbit.quantize.methods import clip, rtn

FORMATS = ["int8", "int4_g32_asym", "int2", "mxfp4", "nvfp4", "ternary"]


def layer(rows=24, columns=192, tokens=500, seed=0, outliers=False):
    """outliers: 3 % of the channels are thirty times larger, and rise and fall together."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = normal(tokens, columns // 8) @ normal(columns // 8, columns) / 2 + normal(tokens, columns)
    weight, inputs = normal(rows, columns) * 0.05, inputs * normal(columns).mul(0.7).exp()
    if outliers:
        large = torch.randperm(columns, generator=generator)[: round(0.03 * columns)]
        inputs[:, large] += 30 * inputs.std() * (1 + normal(tokens, 1)) * normal(len(large)).sign()
    return weight, inputs


def stats_of(inputs):
    gatherer = Gatherer()
    gatherer.add(inputs)
    return gatherer.stats()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outliers", [False, True])
def test_each_group_has_the_best_of_the_grid(name, outliers):
    """The outputs of each group on the tokens, one candidate after the other."""
    format, columns = parse_format(name), 192 if parse_format(name).whole_groups else 200
    weight, inputs = layer(columns=columns, outliers=outliers)
    clipped = clip.quantize(weight, format, stats_of(inputs))
    size = format.group_size or columns
    energy = 1e-3 * inputs.square().mean(0).mean()

    def losses(scale, zero):
        lost = format.decode(format.encode(weight, scale, zero), scale, zero) - weight
        groups = [slice(start, min(start + size, columns)) for start in range(0, columns, size)]
        errors = [(inputs[:, g] @ lost[:, g].T).square().mean(0) + energy * lost[:, g].square().sum(1) for g in groups]
        return torch.stack(errors, 1) if name != "ternary" else torch.stack(errors, 1).sum()

    least = losses(clipped.scale, clipped.zero)
    assert (least <= losses(*format.fit(weight)) * (1 + 1e-4)).all()
    for scale, zero in format.candidates(weight):
        assert (least <= losses(scale, zero) * (1 + 1e-4)).all()
    assert torch.equal(clipped.codes, format.encode(weight, clipped.scale, clipped.zero))


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("name", "least"), [("int4_g128", 1.1), ("int3_g64", 1.3), ("int2_g64", 1.4)])
def test_it_beats_rounding_to_nearest(name, least, outliers):
    format, (weight, inputs) = parse_format(name), layer(64, 256, 2000, outliers=outliers)
    stats = stats_of(inputs)
    nearest, clipped = rtn.quantize(weight, format), clip.quantize(weight, format, stats)
    assert proxy_loss(weight, clipped, stats.gram) * least < proxy_loss(weight, nearest, stats.gram)


@pytest.mark.parametrize("name", FORMATS)
def test_unusual_layers_get_finite_weights(name):
    """bf16, a short last group, one token, channels that never fire."""
    weight, inputs = layer(columns=192 if parse_format(name).whole_groups else 200)
    inputs[:, 5:9] = 0
    for tokens in (inputs, inputs[:1], torch.zeros_like(inputs)):
        clipped = clip.quantize(weight.bfloat16(), parse_format(name), stats_of(tokens))
        assert clipped.dequantize().isfinite().all() and clipped.dequantize().abs().max() > 0


def test_it_needs_calibration():
    with pytest.raises(DiffbitError, match="clip needs calibration tokens"):
        clip.quantize(torch.ones(2, 64), parse_format("int4_g32"), None)
