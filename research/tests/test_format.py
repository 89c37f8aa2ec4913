"""What research/cache/format.py computes, beside the operator's reference."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from diffbit.ops.diff_attention_reference import cached, mixed, scores

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_first_row_is_the_operators_cache(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is nearer to the operator's output than a quarter of what rounding changes; that has rows of float16."""
    monkeypatch.syspath_prepend(str(ROOT / "research/cache"))
    study = importlib.import_module("format")
    generator = torch.Generator().manual_seed(bits)
    query, key, value = (torch.randn(1, heads, 128, 32, generator=generator) for heads in (4, 2, 2))
    key = key + 3 * torch.randn(1, 2, 1, 32, generator=generator)  # large channels that stay
    format = study.replace(study.AS_IT_IS, keys=bits, values=bits)
    exact, rounded = (study.attention(x)(None, query, key, value, None, 0.2)[0] for x in (None, format))

    keys, values = (cached(rows, 128, f"int{bits}", 32, 4, rows is key) for rows in (key, value))
    queries = (query * 0.2).unflatten(1, (2, 2))
    logits = scores(queries, keys, 0).masked_fill(torch.ones(128, 128).triu(1).bool(), -torch.inf)
    expected = mixed(logits.softmax(-1), values.grouped(2, 1)).squeeze(-2).flatten(1, 2).transpose(1, 2)
    assert (rounded - expected).abs().mean() < 0.25 * (expected - exact).abs().mean()
