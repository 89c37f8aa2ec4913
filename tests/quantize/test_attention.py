"""Low-bit attention logits against a slow version, row by row."""

from __future__ import annotations

import pytest
import torch

from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import AttentionScheme, Scheme, apply, quantize_logits


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_query_row_has_its_own_scale(bits):
    logits = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * 20
    valid = torch.ones(5, 7, dtype=torch.bool).tril(2)[None, None]
    logits[..., 6] = 1e4  # seen by the last query only: no other row may scale by it
    got = quantize_logits(logits, valid, bits)
    levels = 2 ** (bits - 1) - 1
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)).tolist():
        seen = valid[0, 0, index[2]]
        row = logits[tuple(index)][seen].tolist()
        step = max(abs(value) for value in row) / levels
        expected = [round(value / step) * step for value in row]
        torch.testing.assert_close(got[tuple(index)][seen], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_and_rows_that_see_nothing():
    logits = torch.tensor([[0.0, 0.0], [3.0, -5.0]])[None, None]
    valid = torch.tensor([[True, True], [False, False]])[None, None]
    got = quantize_logits(logits, valid, 4)
    assert got.isfinite().all() and (got[0, 0, 0] == 0).all()


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_a_scheme_sets_it_on_every_layer(attention):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64,
        attention=attention,
    )  # fmt: skip
    decoder = Decoder(config).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    ids = torch.randint(50, (2, 24))
    exact = decoder(ids)
    errors = [
        (apply(decoder, Scheme(attention=AttentionScheme(bits)))(ids) - exact).norm() / exact.norm()
        for bits in (3, 5, 8, 16)
    ]
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2] > 2 * errors[3]
    assert errors[3] < 1e-3
    assert all(layer.self_attn.logits_hook is None for layer in decoder.model.layers)
