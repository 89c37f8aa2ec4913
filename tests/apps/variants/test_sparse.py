"""Patterns against the papers' sets of keys, written out; artifacts against torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError
from diffbit.apps.variants.attention import sparse
from diffbit.models import ModelConfig, rope_for
from diffbit.models.mixers import Place

from .artifacts import artifact_of, check_session, model_of

OPTIONS = {
    "window": sparse.Options(4, 2, 32, window=5, first=2),
    "random": sparse.Options(4, 2, 32, pattern="random", window=3, first=1, block=4, random_blocks=2),
    "dilated": sparse.Options(4, 2, 32, pattern="dilated", segments=((4, 1), (8, 2), (24, 3))),
}


def drawn(block: int, count: int) -> set[int]:
    prime = 2**31 - 1
    draws = {(block + 1) * factor % prime * 48271 % prime for factor in sparse.PRIMES[:count]}
    return {draw % block for draw in draws} if block else {0}


def keys_of(of: sparse.Options, t: int) -> list[int]:
    """The keys that token t sees, without dilation."""
    keys = set(range(max(0, t - of.window + 1), t + 1)) | set(range(min(of.first, t + 1)))
    if of.pattern == "random":
        for block in drawn(t // of.block, of.random_blocks):
            keys |= set(range(block * of.block, min((block + 1) * of.block, t + 1)))
    return sorted(keys)


def attended(q: Tensor, k: Tensor, v: Tensor, t: int, keys: list[int]) -> tuple[Tensor, Tensor]:
    """softmax(q_t k^T / sqrt d) v over these keys, and its denominator."""
    scores = torch.stack([q[t] @ k[s] / math.sqrt(len(q[t])) for s in keys]).exp()
    return scores @ v[keys] / scores.sum(), scores.sum()


def dilated(of: sparse.Options, q: Tensor, k: Tensor, v: Tensor, t: int, head: int) -> Tensor:
    """LongNet, eq. 9-10: each segment's own softmax, weighted by its share of all denominators."""
    outs = []
    for w, r in of.segments:
        start = t // w * w
        keys = [s for s in range(start, t + 1) if s % r == head % r]
        if t % r == head % r:
            outs.append(attended(q, k, v, t, keys))
    total = sum(denominator for _, denominator in outs)
    return sum(denominator / total * out for out, denominator in outs)  # type: ignore[return-value]


def slow(x: Tensor, module: Any, of: sparse.Options) -> Tensor:
    """Every head and token in float64."""
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    d, half = of.head_dim, of.head_dim // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)

    def rotated(head: Tensor) -> Tensor:
        low, high = head[:, :half], head[:, half:]
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), 1)

    q, k, v = ((x.double() @ weights[f"{name}_proj.weight"].T).split(d, 1) for name in "qkv")
    outs = []
    for head in range(of.num_heads):
        g = head // (of.num_heads // of.num_kv_heads)
        parts = rotated(q[head]), rotated(k[g]), v[g]
        if of.pattern == "dilated":
            outs.append(torch.stack([dilated(of, *parts, t, head) for t in range(len(x))]))
        else:
            outs.append(torch.stack([attended(*parts, t, keys_of(of, t))[0] for t in range(len(x))]))
    return torch.cat(outs, 1) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("pattern", OPTIONS)
def test_heads_are_the_papers_sets_of_keys(pattern: str) -> None:
    torch.manual_seed(0)
    module = OPTIONS[pattern].module(Place(0, 64))
    for parameter in module.parameters():
        parameter.normal_(0, 0.15)
    x = torch.randn(1, 50, 64)
    config = ModelConfig.uniform(
        vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=8
    )
    out = module(x, rope_for(config, torch.arange(50)[None]))[0].double()
    torch.testing.assert_close(out, slow(x[0], module, OPTIONS[pattern]), rtol=0, atol=1e-4)


def test_random_blocks_are_spread() -> None:
    """Four draws of a block fall into each quarter of those before it about equally often, and seldom together."""
    places = [4 * block // i for i in range(40, 400) for block in drawn(i, 4)]
    assert len(places) > 3.9 * 360
    assert all(abs(places.count(quarter) / len(places) - 0.25) < 0.04 for quarter in range(4))


def test_segments_without_the_token_itself_are_refused() -> None:
    with pytest.raises(DiffbitError, match="wanted one of dilation 1"):
        sparse.Options(4, 2, 32, pattern="dilated", segments=((8, 2),))


CASES = {  # weights, keys and values, the artifact's dtype, the error allowed
    "float": (None, "float", "fp32", 1e-3),
    "int8": ("int8_g32", "int8", "fp32", 0.1),
    "half": (None, "float", "fp16", 0.05),
}


@pytest.mark.parametrize("case", CASES)
def test_session_computes_what_torch_does(tmp_path: Path, case: str) -> None:
    """A layer of each pattern."""
    weights, kv, dtype, bound = CASES[case]
    decoder = model_of(*OPTIONS.values(), factor=4)
    check_session(*artifact_of(decoder, tmp_path, weights=weights, kv=kv, dtype=dtype), bound)
