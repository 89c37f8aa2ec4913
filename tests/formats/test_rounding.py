"""How a ternary layer's input is rounded, against slow versions in float64 and rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from diffbit.formats import Rounding, parse_format, rounded_input, spread
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, apply

INT4 = Scheme(weights=parse_format("ternary"), activations="int4")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [1, 7, 300, 4096])
def test_four_bits_are_the_slow_version(columns: int) -> None:
    x = normal(5, columns) * torch.tensor([1.0, 1e-7, 0.0, 1e4, 1.0])[:, None]
    x[4, 0] = 1e6  # an outlier beside which the rest is hard to sum up
    q, a = rounded_input(x, Rounding(4))
    for row, codes, step in zip(x.tolist(), q.tolist(), a[:, 0].tolist(), strict=True):
        mean = np.float32(float(sum(abs(Fraction(value)) for value in row) / columns))
        expected = max(mean, np.float32(1e-5)) / np.float32(math.sqrt(7))
        assert step == pytest.approx(expected, rel=1.2e-7)
        assert codes == [min(max(round(float(np.float32(value) / np.float32(step))), -8), 7) for value in row]


def test_the_mean_does_not_depend_on_the_order_of_its_sum() -> None:
    x = normal(1, 5000).mul(8).exp()
    steps = {float(rounded_input(x[:, normal(5000, seed=i).argsort()], Rounding(4))[1]) for i in range(200)}
    assert len(steps) == 1


def test_eight_bits_are_the_slow_version() -> None:
    x = normal(4, 300) * torch.tensor([1.0, 1e-7, 0.0, 1e4])[:, None]
    q, a = rounded_input(x, Rounding())
    for row, codes, step in zip(x.numpy(), q.tolist(), a[:, 0].numpy(), strict=True):
        assert step == max(np.abs(row).max(), np.float32(1e-5)) / np.float32(127)
        assert codes == [round(float(value / step)) for value in row]


@pytest.mark.parametrize("block", [2, 64, 256])
def test_spread_and_its_gradient_are_products_with_hadamards_matrix(block: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]]).double(), matrix)
    matrix = torch.block_diag(*[matrix] * (768 // block)) / math.sqrt(block)
    x, gradient = normal(2, 3, 768).requires_grad_(), normal(2, 3, 768, seed=1)
    spread(x, Rounding(4, block)).backward(gradient)
    for got, source in ((spread(x, Rounding(4, block)), x), (x.grad, gradient)):
        assert got is not None
        torch.testing.assert_close(got.double(), source.double() @ matrix, rtol=0, atol=3e-6)


def test_which_layer_rounds_how() -> None:
    ternary, integer = parse_format("ternary"), parse_format("int4_g32")
    assert ternary.rounding("model.layers.0.mlp.down_proj", 96, "int4") == Rounding(4, 32)
    assert ternary.rounding("self_attn.o_proj", 256, "int4") == Rounding(4, 256)
    assert ternary.rounding("model.layers.0.mlp.up_proj", 256, "int4") == Rounding(4)
    assert ternary.rounding("model.layers.0.mlp.down_proj", 256, "int8") == Rounding()
    assert ternary.rounding("model.layers.0.mlp.down_proj", 256, None) == Rounding()
    assert integer.rounding("model.layers.0.mlp.down_proj", 256, "int8") == Rounding()
    assert integer.rounding("model.layers.0.mlp.down_proj", 256, None) is None


def test_spread_weights_meet_spread_inputs() -> None:
    """A float model is quantized so that x H meets W H: outliers of one channel then cost little."""
    config = ModelConfig.uniform(
        vocab_size=50, hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32, intermediate_size=96,
        max_position=64, attention="softmax",
    )  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(config)
    layer = apply(decoder, INT4).model.layers[0].mlp.down_proj
    weight = decoder.model.layers[0].mlp.down_proj.weight.detach()
    assert layer.rounding == Rounding(4, 32)
    turned = spread(layer.weight.dequantize(), layer.rounding)  # H is its own inverse
    assert (turned * weight).sum() > 0.8 * turned.norm() * weight.norm()
    x = normal(64, 96)
    x[:, 5] *= 30
    exact = x @ weight.T
    assert ((layer(x) - exact).norm() / exact.norm()) < 0.8


def test_other_methods_refuse_int4_activations() -> None:
    config = ModelConfig.uniform(
        vocab_size=50, hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32, intermediate_size=96,
        max_position=64, attention="softmax",
    )  # fmt: skip
    with pytest.raises(DiffbitError, match="'gptq' does not support int4 activations"):
        apply(Decoder(config), INT4, "gptq", calibration=torch.zeros(1, 8, dtype=torch.int64))
