"""Retention against its recurrent form, token by token in float64, and its artifacts against torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffbit.apps.variants.mixers import retention
from diffbit.models import ModelConfig, rope_for
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import Place

from .artifacts import artifact_of, check_session, model_of

OPTIONS = retention.Options(num_heads=4, head_dim=16)


def slow(x: Tensor, module: torch.nn.Module, theta: float = 10000.0) -> Tensor:
    """Equations 6 and 8 as they are printed, with complex rotations, one token and head at a time; x [S, E]."""
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    heads, d = OPTIONS.num_heads, OPTIONS.head_dim
    frequencies = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    states = [torch.zeros(d // 2, 2 * d, dtype=torch.complex128) for _ in range(heads)]
    rows = []
    for t, token in enumerate(x.double()):
        query, key, value, gate = (weights[f"{name}_proj.weight"] @ token for name in "qkvg")
        turn = torch.polar(torch.ones_like(frequencies), t * frequencies)
        outs = []
        for h in range(heads):
            # pairs (j, j + d/2) as complex numbers: the real part of q conj(k) is their product
            q, k = (torch.complex(*part.view(heads, 2, d // 2)[h]) * turn for part in (query, key))
            v = value.view(heads, 2 * d)[h]
            states[h] = (1 - 2.0 ** (-5 - h)) * states[h] + torch.outer(k.conj() / d**0.5, v.to(k.dtype))
            out = (q @ states[h]).real
            outs.append(out / (out.square().mean() + retention.NORM_EPS).sqrt())
        rows.append(weights["o_proj.weight"] @ (torch.cat(outs) * gate * gate.sigmoid()))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    module = OPTIONS.module(Place(0, 64))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module


def test_parallel_form_is_the_recurrent_one(module: torch.nn.Module) -> None:
    x = torch.randn(1, 40, 64)
    config = ModelConfig.uniform(
        vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16, intermediate_size=8,
        attention="retention",
    )  # fmt: skip
    assert config.layers[0].mixer == OPTIONS
    out = module(x, rope_for(config, torch.arange(40)[None]))
    torch.testing.assert_close(out[0].double(), slow(x[0], module), rtol=0, atol=2e-4)


CASES = {
    "float": (None, "float", "fp32", 1e-3),
    "int4": ("int4_g32", "int8", "fp32", 0.1),
    "half": (None, "float", "fp16", 0.05),
}


@pytest.mark.parametrize("case", CASES)
def test_session_computes_what_torch_does(tmp_path: Path, case: str) -> None:
    weights, kv, dtype, bound = CASES[case]
    decoder = model_of(OPTIONS, diff_v1.Options(2, 1, 16), retention.Options(2, 16), factor=4)
    check_session(*artifact_of(decoder, tmp_path, weights=weights, kv=kv, dtype=dtype), bound)
