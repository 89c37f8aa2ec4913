"""AWQ: the search against tokens and loops, exactness of what it makes, what it gains, odd shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diffbit.formats import parse_format
from diffbit.quantize import Scheme, apply
from diffbit.quantize.calibration.stats import Gatherer
from diffbit.quantize.methods import awq

from ..transforms import config_of, logits64, random_decoder, random_ids, transformed

FORMATS = ["int8", "int4_g32_asym", "int2_g16", "mxfp4", "nvfp4", "ternary"]


def layer(columns=192, tokens=500, seed=0, outliers=False):
    """Inputs [T, K] as layers have them, correlated and some channels much larger, and two weights that read them.

    outliers: 3 % of the channels are thirty times larger, and rise and fall together.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = normal(tokens, columns // 4) @ normal(columns // 4, columns) / 3 + normal(tokens, columns)
    inputs *= normal(columns).mul(1.2).exp()
    if outliers:
        large = torch.randperm(columns, generator=generator)[: round(0.03 * columns)]
        inputs[:, large] += 30 * inputs.std() * (1 + normal(tokens, 1)) * normal(len(large)).sign()
    return inputs, [normal(24, columns) * 0.05, normal(10, columns) * 0.02]


def stats_of(inputs):
    gatherer = Gatherer()
    gatherer.add(inputs)
    return gatherer.stats()


def slow_search(weights, formats, inputs, channels):
    """Every scale of the grid tried out on the tokens themselves, in float64; channel by channel, row by row."""
    inputs, count = inputs.double(), int(channels.max()) + 1
    x, w = torch.zeros(count).double(), torch.zeros(count).double()
    for c in range(count):
        shared = [k for k in range(len(channels)) if channels[k] == c]
        x[c] = sum(inputs[:, k].abs().mean() for k in shared) / len(shared)
        for k in shared:
            ratios = []
            for weight, format in zip(weights, formats, strict=True):
                size = format.group_size or weight.shape[1]
                group = slice(k // size * size, (k // size + 1) * size)
                ratios += [float(row[k].abs() / row[group].abs().max().clamp(min=1e-30)) for row in weight]
            w[c] += sum(ratios) / len(ratios) / len(shared)
    x, w = ((v / v.mean()).clamp(min=1e-4) for v in (x, w))
    best, least = None, float("inf")
    for step in range(21):
        for scale in (x ** (step / 20), x ** (step / 20) / w ** (1 - step / 20)):
            scale = scale / (scale.max() * scale.min()).sqrt()
            loss = 0.0
            for weight, format in zip(weights, formats, strict=True):
                scaled = weight * scale[channels].float()
                rounded = format.nearest(scaled, *format.fit(scaled)).dequantize().double()
                loss += (inputs @ weight.double().T - (inputs / scale[channels]) @ rounded.T).square().sum()
            if loss < least:
                best, least = scale, loss
    return best


@pytest.mark.parametrize(
    ("name", "shared", "outliers"),
    [
        *((name, False, False) for name in FORMATS),
        *((name, *case) for name in ("int4_g32_asym", "ternary") for case in ((True, False), (False, True))),
    ],
)
def test_it_is_the_slow_search(name, shared, outliers):
    inputs, weights = layer(outliers=outliers)
    formats = [parse_format(name), parse_format("int8" if name == "ternary" else name)]
    channels = torch.arange(192) % 96 if shared else torch.arange(192)
    scales = awq.search(weights, formats, stats_of(inputs), channels)
    torch.testing.assert_close(scales.double(), slow_search(weights, formats, inputs, channels), rtol=1e-4, atol=0)
    assert name == "ternary" or scales.max() > 1.5 * scales.min()


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("name", "least"), [("int4_g32", 1.5), ("int3_g64", 1.5), ("int2_g16", 1.3), ("nf4", 1.3)])
def test_it_beats_rounding_to_nearest(name, least, outliers):
    inputs, (weight, _) = layer(256, 2000, outliers=outliers)
    format, stats = parse_format(name), stats_of(inputs)
    nearest = awq.rounding_loss(weight, format, stats.gram, torch.ones(256))
    scaled = awq.rounding_loss(weight, format, stats.gram, awq.search([weight], [format], stats))
    assert scaled * least < nearest
    off_by_one = awq.rounding_loss(weight, format, stats.gram, awq.search([weight], [format], stats).roll(1))
    assert off_by_one > nearest


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in FORMATS), ("int2_g16", torch.float16)]
)
def test_unusual_layers_get_finite_scales(name, dtype):
    """Half precision, a short last group, one token, channels that never fire, rows sampled: finite and positive."""
    columns = 192 if parse_format(name).whole_groups else 200
    inputs, weights = layer(columns)
    inputs[:, 5:9] = 0
    for tokens in (inputs, inputs[:1], inputs[:0], torch.zeros_like(inputs)):
        scale = awq.search([weights[0].to(dtype)], [parse_format(name)], stats_of(tokens))
        assert scale.shape == (columns,) and scale.isfinite().all() and (scale > 0).all()


def test_the_scale_is_a_candidate_if_rows_are_sampled(monkeypatch):
    inputs, weights = layer()
    formats, stats = [parse_format("int3_g64")] * 2, stats_of(inputs)
    monkeypatch.setattr(awq, "ROWS", 8)
    candidates = {tuple(scale.tolist()) for scale in awq.candidates(weights, formats, stats, torch.arange(192))}
    assert tuple(awq.search(weights, formats, stats).tolist()) in candidates


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_the_float_model_stays(attention):
    decoder, ids = random_decoder(config_of(attention), dtype=torch.float64), random_ids()
    scheme = Scheme(weights=parse_format("int3_g16"))
    scaled = transformed(decoder, awq, scheme, ids)
    torch.testing.assert_close(logits64(scaled, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    for name, parameter in decoder.model.layers[0].named_parameters():
        untouched = "lambda_q" in name or "lambda_k" in name or (attention == "diff_v1" and "o_proj" in name)
        assert torch.equal(scaled.model.layers[0].get_parameter(name), parameter) == untouched, name


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_a_model_with_uneven_channels_loses_less(attention):
    decoder = random_decoder(config_of(attention))
    with torch.no_grad():
        for layer in decoder.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.mul_(torch.randn(64).mul(1.5).exp())
    ids, scheme = random_ids(16, 32), Scheme(weights=parse_format("int4_g32"))
    with torch.inference_mode():
        exact = decoder(ids)
        losses = [
            float((apply(decoder, scheme, method, text)(ids) - exact).square().mean())
            for method, text in (("rtn", None), ("awq", ids))
        ]
    assert losses[1] * 1.1 < losses[0], losses


def test_a_head_of_its_own_is_scaled_too():
    decoder = random_decoder(config_of("softmax"))
    scheme = Scheme(overrides=(("lm_head", parse_format("int3_g16")),))
    scaled = transformed(decoder, awq, scheme, random_ids())
    assert not torch.equal(scaled.lm_head.weight, decoder.lm_head.weight)
    tied = random_decoder(replace(config_of("softmax"), tie_embeddings=True))
    assert apply(tied, scheme, "awq", random_ids()).lm_head.weight.shape == (61, 64)
