"""Composed heads against the authors' formula, token by token, and artifacts with every cache against torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit.apps.variants.attention import dcmha
from diffbit.models import Decoder, ModelConfig, rope_for
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import MixerOptions, Place

from .artifacts import artifact_of, check_session, model_of

OPTIONS = dcmha.Options(4, 2, 32)


def larger(decoder: Decoder) -> Decoder:
    """The decoder with compositions that show in the logits; a trained one begins with hardly any."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("qkw"):
                parameter.mul_(100)
    return decoder


def composable(*mixers: MixerOptions) -> Decoder:
    return larger(model_of(*mixers, factor=4))


def slow(x: Tensor, module: Any, of: dcmha.Options) -> Tensor:
    """Section 2 and the authors' DynamicWeightProjection, in float64, one pair of tokens at a time."""
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    d, half, count = of.head_dim, of.head_dim // 2, of.num_heads
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)

    def rotated(head: Tensor) -> Tensor:
        low, high = head[:, :half], head[:, half:]
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), 1)

    def matrix(token: Tensor, which: int) -> Tensor:
        """The matrix [H, H] that a token adds: which of query before, key before, query after, key after."""
        hidden = (weights["dw1_proj.weight"] @ token).split(4 * count)[which]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        first, second = (hidden @ weights["qkw"][which]).view(2, 2, count)
        diagonal = (weights["dd_proj.weight"] @ token).split(count)[which].tanh()
        added = diagonal.diag()
        for one, two in zip(first, second, strict=True):
            added = added + torch.outer(one / (one.square().mean() + 1e-6).sqrt(), two)
        return added

    x = x.double()
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).split(d, 1) for name in "qkv")
    q, k = [rotated(head) for head in q], [rotated(head) for head in k]
    group = [head // (count // of.num_kv_heads) for head in range(count)]
    matrices = [[matrix(token, which) for token in x] for which in range(4)]
    rows = []
    for t in range(len(x)):
        scores = torch.zeros(count, t + 1, dtype=torch.float64)
        for s in range(t + 1):
            score = torch.stack([q[h][t] @ k[group[h]][s] / math.sqrt(d) for h in range(count)])
            scores[:, s] = score + score @ (matrices[0][t] + matrices[1][s])
        shares = scores.softmax(1)
        shares = torch.stack([a + a @ (matrices[2][t] + matrices[3][s]) for s, a in enumerate(shares.T)], 1)
        rows.append(torch.cat([shares[h] @ v[group[h]][: t + 1] for h in range(count)]))
    return torch.stack(rows) @ weights["o_proj.weight"].T


def test_heads_are_the_formula() -> None:
    torch.manual_seed(0)
    module = OPTIONS.module(Place(0, 64))
    for parameter in module.parameters():
        parameter.normal_(0, 0.2)
    x = torch.randn(1, 15, 64)
    config = ModelConfig.uniform(
        vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=8
    )
    out = module(x, rope_for(config, torch.arange(15)[None]))[0].double()
    right = slow(x[0], module, OPTIONS)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-4 * float(right.std()))


CASES = {  # weights, keys and values, the artifact's dtype, the sliding window, the error allowed
    "float": (None, "float", "fp32", 0, 2e-3),
    "window": (None, "float", "fp32", 9, 2e-3),
    "half": (None, "float", "fp16", 0, 0.1),
    "int8": ("int8_g32", "int8", "fp32", 0, 0.1),
    "int4": (None, "int4", "fp32", 0, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_session_computes_what_torch_does(tmp_path: Path, case: str) -> None:
    weights, kv, dtype, window, bound = CASES[case]
    of = replace(OPTIONS, sliding_window=window)
    decoder = composable(of, diff_v1.Options(2, 1, 32, sliding_window=window), of)
    artifact, model = artifact_of(decoder, tmp_path, weights=weights, kv=kv, dtype=dtype)
    check_session(artifact, model, bound, batch=kv != "int4")
