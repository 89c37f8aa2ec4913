"""SmoothQuant: the search against loops, exactness of what it makes, what it gains where a few channels stand out."""

from __future__ import annotations

import pytest
import torch

from diffbit.errors import DiffbitError
from diffbit.models import Decoder
from diffbit.quantize import QuantLinear, Scheme, apply, parse_format, quantize_per_token_int8
from diffbit.quantize.methods import rtn, smooth

from ..transforms import config_of, logits64, pieces, random_decoder, random_ids, transformed

INT8 = Scheme(weights=parse_format("int8"), activations="int8")


def planted(attention: str) -> Decoder:
    """Three channels of every normed input, and of the MLP's and the values' insides, forty times the others."""
    decoder = random_decoder(config_of(attention))
    with torch.no_grad():
        for layer in decoder.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[[3, 17, 40]] *= 40
            readers = [p for n, p in layer.self_attn.named_parameters() if p.dim() == 2 and "o_proj" not in n]
            for weight in (*readers, layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
                weight[:, [3, 17, 40]] /= 40
            layer.mlp.up_proj.weight[[5, 50]] *= 40
            layer.mlp.down_proj.weight[:, [5, 50]] /= 40
    return decoder


@pytest.mark.parametrize("name", ["int8", "int4_g32_asym", "nf4", "ternary"])
@pytest.mark.parametrize("shared", [False, True])
def test_it_is_the_slow_search(name, shared):
    torch.manual_seed(0)
    weights, formats = [torch.randn(12, 64), torch.randn(6, 64)], [parse_format(name)] * 2
    sample = torch.randn(40, 64) * torch.randn(64).exp()
    absmax = sample.abs().amax(0) * 1.5
    channels = torch.arange(64) % 32 if shared else torch.arange(64)
    count = 32 if shared else 64
    x = torch.tensor([max(float(absmax[k]) for k in range(64) if channels[k] == c) for c in range(count)])
    w = [max(float(p[:, k].abs().max()) for p in weights for k in range(64) if channels[k] == c) for c in range(count)]
    best, least = None, float("inf")
    for alpha in (None, *(step / 20 for step in range(4, 20))):
        scale = torch.ones(count) if alpha is None else x**alpha / torch.tensor(w) ** (1 - alpha)
        loss = 0.0
        for weight, format in zip(weights, formats, strict=True):
            rounded = rtn.quantize(weight * scale[channels], format).dequantize()
            for token in sample:
                given = quantize_per_token_int8(token / scale[channels])
                loss += float((rounded @ given - weight @ token).square().sum())
        if loss < least:
            best, least = scale, loss
    found = smooth.search("model.layers.0.mlp.up_proj", weights, formats, smooth.Inputs(sample, absmax), INT8, channels)
    torch.testing.assert_close(found, best)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_the_float_model_stays(attention):
    decoder, ids = random_decoder(config_of(attention), dtype=torch.float64), random_ids()
    made = transformed(decoder, smooth, INT8, ids)
    torch.testing.assert_close(logits64(made, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    assert not torch.equal(made.model.layers[1].mlp.down_proj.weight, decoder.model.layers[1].mlp.down_proj.weight)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
@pytest.mark.parametrize("name", ["int8", "int4_g32"])
def test_outliers_stop_hurting(attention, name):
    decoder, ids = planted(attention), random_ids(16, 32)
    scheme = Scheme(weights=parse_format(name), activations="int8")
    weights_only = Scheme(weights=parse_format(name))
    with torch.inference_mode():
        exact = decoder(ids)
        float_activations, plain, smoothed = (
            float((apply(decoder, s, method, ids)(ids) - exact).square().mean())
            for s, method in ((weights_only, "rtn"), (scheme, "rtn"), (scheme, "smooth"))
        )
    # the least that is left: with int8 the weights' own error, which the moved outliers made larger
    assert plain > (4 if name == "int8" else 1.1) * float_activations, (plain, smoothed, float_activations)
    assert smoothed * (20 if name == "int8" else 1.5) < plain, (plain, smoothed, float_activations)


def test_a_sample_and_all_maxima(monkeypatch):
    monkeypatch.setattr(smooth, "SAMPLE", 10)
    decoder, ids = random_decoder(config_of("diff_v1")), random_ids()
    first = next(piece for piece in pieces(decoder, INT8, ids) if piece.is_layer)
    inputs = smooth.gather(first)
    x = decoder.model.layers[0].input_layernorm(decoder.embed(ids)).flatten(0, 1)
    found = inputs["model.layers.0.self_attn.k_proj"]
    torch.testing.assert_close(found.absmax, x.abs().amax(0))
    torch.testing.assert_close(found.sample, x[::10])  # 96 tokens


def test_float_activations_are_refused():
    decoder, ids = random_decoder(config_of("softmax")), random_ids()
    with pytest.raises(DiffbitError, match="add --activations int8, or leave smooth out"):
        apply(decoder, Scheme(weights=parse_format("int4_g32")), "smooth", ids)
    made = apply(decoder, Scheme(weights=parse_format("ternary")), "smooth", ids)  # rounds its input in any case
    assert isinstance(made.model.layers[0].mlp.down_proj, QuantLinear)


def test_channels_that_never_fire():
    decoder, ids = random_decoder(config_of("softmax")), random_ids(1, 2)
    with torch.no_grad():
        decoder.model.layers[0].input_layernorm.weight[4] = 0
        decoder.model.layers[0].mlp.down_proj.weight[:, 9] = 0
    assert apply(decoder, INT8, "smooth", ids)(ids).isfinite().all()
