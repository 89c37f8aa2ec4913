"""Rounding to nearest with text: the mean squares of the float model's inputs, and what they are used for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffbit.formats import QTensor, parse_format
from diffbit.models import Decoder
from diffbit.quantize import Scheme, apply
from diffbit.quantize.calibration import scales, states
from diffbit.quantize.methods import rtn

from ..transforms import config_of, random_decoder, random_ids

INT3 = parse_format("int3_g32")
MASK = torch.arange(24) < torch.tensor([24, 24, 9, 24])[:, None]


def mean_squares(decoder: Decoder, ids: Tensor) -> dict[str, Tensor | None]:
    """Of the input of every linear layer of a float model, and of the head's as the embedding's."""
    squares: dict[str, Tensor | None] = {}

    def keep(name: str) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares[name] = inputs[0][MASK].square().mean(0)

        decoder.get_submodule(name).register_forward_pre_hook(hook)

    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            keep(name)

    def last(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        squares["model.embed_tokens"] = output[MASK].square().mean(0)

    decoder.model.norm.register_forward_hook(last)
    with torch.no_grad():
        decoder(ids, attention_mask=MASK.long())
    return squares


@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2", "softmax"])
@pytest.mark.parametrize("tie", [False, True])
def test_it_weighs_with_the_inputs_of_the_float_model(attention, tie, monkeypatch):
    monkeypatch.setattr(states, "BATCH_TOKENS", 50)
    config, ids = config_of(attention, tie_embeddings=tie), random_ids()
    scheme = Scheme(weights=INT3, embedding=INT3, head=INT3)
    decoder = random_decoder(config)
    quantized = apply(decoder, scheme, "rtn", ids, MASK)
    floats, squares = dict(random_decoder(config).named_parameters()), mean_squares(random_decoder(config), ids)
    if not tie:
        squares["model.embed_tokens"] = None
    for name in scheme.formats(quantized.config):
        expected = rtn.quantize(floats[f"{name}.weight"].detach(), INT3, squares[name])
        codes = quantized.get_submodule(name).weight.codes
        assert (codes != expected.codes).float().mean() < 2e-3, name  # sums in another order may turn a tie
    plain = apply(decoder, scheme, "rtn").get_submodule("model.layers.1.mlp.down_proj").weight
    assert not torch.equal(plain.codes, quantized.get_submodule("model.layers.1.mlp.down_proj").weight.codes)


@pytest.mark.parametrize(
    ("name", "most"), [("int8", 0.98), ("int4_g32", 0.8), ("int4_g32_asym", 0.95), ("int2_g64", 0.75), ("nf4", 0.95)]
)
def test_text_lowers_the_error(name, most):
    format, generator = parse_format(name), torch.Generator().manual_seed(0)
    weight = torch.randn(64, 192, generator=generator)
    square = torch.randn(192, generator=generator).exp()

    def error(q):
        return float(((q.dequantize() - weight).square() * square).sum())

    weighted = error(rtn.quantize(weight, format, square))
    assert weighted < error(rtn.quantize(weight, format))
    assert weighted < most * error(format.nearest(weight, *format.fit(weight)))
    assert weighted < 1.05 * error(format.nearest(weight, *scales.search(weight, format, square)))


def test_a_format_that_is_trained_keeps_its_scale():
    format, weight = parse_format("ternary"), torch.randn(8, 64)
    ours, plain = rtn.quantize(weight, format, torch.rand(64)), rtn.quantize(weight, format)
    assert torch.equal(ours.scale, plain.scale) and torch.equal(ours.codes, plain.codes)


def test_a_head_of_8_bits_is_rounded_to_nearest():
    decoder, scheme = random_decoder(config_of("diff_v2")), Scheme(weights=INT3, head=parse_format("int8"))
    with_text, plain = apply(decoder, scheme, "rtn", random_ids()), apply(decoder, replace(scheme), "rtn")
    assert torch.equal(with_text.lm_head.weight.codes, plain.lm_head.weight.codes)


@pytest.mark.parametrize("name", ["int3_g32_s8", "nl4_g32_s8", "int4_g32", "mxfp4", "nvfp4"])
def test_a_file_holds_the_scales_that_codes_were_chosen_with(name):
    """Also where a row has a scale of its own, and each group a step of it."""
    format, weight = parse_format(name), torch.randn(16, 192) * torch.randn(16, 192).exp()
    quantized = rtn.quantize(weight, format, torch.rand(192))
    stored = QTensor.from_packed(format, quantized.shape, **quantized.parts())
    assert torch.equal(stored.dequantize(), quantized.dequantize())
    assert torch.equal(stored.codes, format.encode(weight, stored.scale, stored.zero))
