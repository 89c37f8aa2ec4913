"""KAN against its equations, edge by edge with the recursion of Cox and de Boor, and up to the artifact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError
from diffbit.apps.variants.mlp import kan
from diffbit.models import LayerSpec, ModelConfig
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import Place
from diffbit.quantize import Scheme
from diffbit.quantize.methods import awq, rotate

from ...quantize.transforms import transformed
from . import checks

OPTIONS = kan.Options(64, grid_size=4, grid_range=2.0)
ATTENTION = diff_v1.Options(num_heads=2, num_kv_heads=1, head_dim=16)
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    layers=(LayerSpec(ATTENTION, OPTIONS), LayerSpec(ATTENTION, OPTIONS, sub_norms=True)),
    max_position=64,
)


def spline(x: float, knots: list[float], n: int, order: int) -> float:
    """B_n of this order, by the recursion of Cox and de Boor."""
    if order == 0:
        return float(knots[n] <= x < knots[n + 1])
    rising = (x - knots[n]) / (knots[n + order] - knots[n]) * spline(x, knots, n, order - 1)
    falling = (knots[n + order + 1] - x) / (knots[n + order + 1] - knots[n + 1]) * spline(x, knots, n + 1, order - 1)
    return rising + falling


def layer_by_the_book(x: Tensor, weight: Tensor) -> Tensor:
    """One layer of a token x [E] in float64, an edge at a time; weight [F, (G + 4) E]."""
    size, limit, width = OPTIONS.grid_size, OPTIONS.grid_range, 2 * OPTIONS.grid_range / OPTIONS.grid_size
    knots = [-limit + width * i for i in range(-3, size + 4)]
    coefficients = weight.double().unflatten(1, (size + 4, -1))  # [F, G + 4, E]
    out = torch.zeros(len(weight), dtype=torch.float64)
    for j, value in enumerate(x.tolist()):
        silu = value / (1 + torch.tensor(-value, dtype=torch.float64).exp())
        functions = torch.tensor([silu, *(spline(value, knots, n, 3) for n in range(size + 3))], dtype=torch.float64)
        out += coefficients[:, :, j] @ functions
    return out


def test_kan_is_its_equations() -> None:
    torch.manual_seed(0)
    module = kan.Options(6, grid_size=4, grid_range=2.0).module(Place(0, 5))
    x = torch.randn(1, 8, 5) * 1.5  # some numbers are outside the grid
    assert (x.abs() > 2).any()
    for token, output in zip(x[0], module(x)[0], strict=True):
        hidden = layer_by_the_book(token.double(), module.up_proj.weight)
        torch.testing.assert_close(
            output.double(), layer_by_the_book(hidden, module.down_proj.weight), rtol=0, atol=1e-5
        )


def test_splines_sum_to_one_inside_the_grid() -> None:
    module = OPTIONS.module(Place(0, 1))
    x = torch.linspace(-2, 2, 101)[None, :, None]
    torch.testing.assert_close(module.features(x)[..., 1:].sum(-1), torch.ones(1, 101))


def test_methods_that_scale_the_stream() -> None:
    """awq leaves the MLP alone, rotate cannot."""
    model, ids = checks.random_decoder(CONFIG), checks.ids_of(CONFIG, 2, 9)
    scaled = transformed(model, awq, Scheme.from_dict({"weights": "int4_g32"}), ids)
    torch.testing.assert_close(scaled(ids), model(ids), rtol=0, atol=1e-4)
    layer, before = scaled.model.layers[0], model.model.layers[0]
    assert torch.equal(layer.mlp.up_proj.weight, before.mlp.up_proj.weight)
    assert not torch.equal(layer.self_attn.q_proj.weight, before.self_attn.q_proj.weight)
    with pytest.raises(DiffbitError, match=r"layers.0: its MLP \(kan\) computes functions of single channels"):
        transformed(model, rotate, Scheme.from_dict({"weights": "int4_g32"}), ids)
