"""Measured losses, compared with running a copy of the model whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffbit import models
from diffbit.formats import parse_format
from diffbit.models import Decoder
from diffbit.quantize import Scheme, apply, linear_shapes, resolve
from diffbit.quantize.allocation.losses import Losses, measure
from diffbit.quantize.calibration import Tokens
from diffbit.quantize.methods import Method, find
from diffbit.quantize.methods.rtn import quantize as rtn

from .small import CONFIG, IDS, MASK, divergence, make


def measured(
    decoder: Decoder, base: Decoder, rounding: Method, names: dict[str, list[str]], tokens: Tokens | None
) -> Losses:
    sample = Tokens(decoder.config, IDS, MASK)
    formats = {
        module: {name: None if name == "none" else parse_format(name) for name in row} for module, row in names.items()
    }
    return measure(decoder, base, sample, resolve(base.config), formats, rounding, tokens)


LINEARS = [name for name in linear_shapes(CONFIG) if name != "lm_head"]


def error(weight: Tensor, name: str) -> float:
    return float((weight.double() - rtn(weight, parse_format(name)).dequantize()).square().sum())


def test_a_loss_is_the_divergence_of_the_model_with_that_weight_rounded() -> None:
    """Around the float model and one with some layers in int2, with padding: a copy of the model run whole."""
    decoder = make()
    fixed = tuple((name, parse_format("int2_g64")) for name in LINEARS[:3])
    for overrides, modules in (((), LINEARS), (fixed, LINEARS[3:])):
        base = apply(decoder, Scheme(overrides=overrides))
        formats = {module: ["int2_g64", "int4_g32_asym", "none"] for module in modules}
        for module, row in measured(decoder, base, find("rtn"), formats, None).items():
            weight = decoder.get_submodule(module).weight.detach()
            changed = copy.deepcopy(base)
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = rtn(weight, parse_format("int2_g64")).dequantize()
            changed.set_submodule(module, linear)
            loss = divergence(base, changed)
            assert row["int2_g64"] == pytest.approx(loss, rel=1e-3, abs=3e-7), module
            other = loss * error(weight, "int4_g32_asym") / error(weight, "int2_g64")
            assert row["int4_g32_asym"] == pytest.approx(other, rel=1e-3, abs=3e-7) and row["none"] == 0, module


def test_losses_are_measured_in_the_first_format_that_changes_a_weight() -> None:
    decoder, module = make(), LINEARS[4]
    weight = decoder.get_submodule(module).weight
    weight.data = rtn(weight.detach(), parse_format("int4_g32")).dequantize()
    (losses,) = measured(decoder, decoder, find("rtn"), {module: ["int4_g32", "int2_g64"]}, None).values()
    rounded = apply(decoder, Scheme(overrides=((module, parse_format("int2_g64")),)))
    assert losses == {"int4_g32": 0, "int2_g64": pytest.approx(divergence(decoder, rounded), rel=1e-3)}


def test_gptq_losses_equal_those_of_the_rounded_model() -> None:
    """Of find("gptq"), one layer in a format: the divergence of the very model that `apply` makes of that scheme."""
    decoder = make()
    formats = {module: ["int2_g64"] for module in LINEARS}
    losses = measured(decoder, decoder, find("gptq"), formats, Tokens(CONFIG, IDS, MASK))
    for module in LINEARS:
        rounded = apply(decoder, Scheme(overrides=((module, parse_format("int2_g64")),)), "gptq", IDS, MASK)
        assert losses[module]["int2_g64"] == pytest.approx(divergence(decoder, rounded), rel=2e-3, abs=2e-7), module


@pytest.mark.parametrize("name", ["softmax", "diff_v1"])
def test_what_is_scaled_is_near_what_is_measured(name: str, trained: Callable[[str], Path]) -> None:
    """By gptq on trained weights: int8 and int2 from int4, which lose 300 times less and 20 times more."""
    decoder = models.load(trained(name))
    ids = torch.randint(decoder.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    sample, tokens = (Tokens(decoder.config, ids, torch.ones_like(ids, dtype=torch.bool)) for _ in range(2))
    names = ["int4_g64", "int8", "int2_g64"]
    modules = [module for module in linear_shapes(decoder.config) if module.startswith("model.layers.1.")]

    def losses(order: list[str]) -> Losses:
        formats = {module: {name: parse_format(name) for name in order} for module in modules}
        return measure(decoder, decoder, sample, resolve(decoder.config), formats, find("gptq"), tokens)

    scaled = losses(names)
    for other in names[1:]:
        exact = losses([other])
        for module in modules:
            assert 1 / 4 < scaled[module][other] / exact[module][other] < 4, (module, other)
