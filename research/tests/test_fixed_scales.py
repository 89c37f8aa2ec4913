"""What research/cache/fixed_scales.py computes, beside ONNX Runtime's operator."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.export.test_fixed_scales import grouped_query

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_cache_is_the_operators(bits: int, per_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an offset and a rotation, which are outside of the operator. Scales are of a part of the tokens, so that
    others are clipped."""
    monkeypatch.syspath_prepend(str(ROOT / "research/cache"))
    study = importlib.import_module("fixed_scales")
    format = study.Fixed("", bits, bits, per_channel, rotated=False, offset="")
    generator = torch.Generator().manual_seed(bits)
    query, key, value = (torch.randn(1, heads, 48, 32, generator=generator) for heads in (4, 2, 2))
    pairs = [study.fitted(rows[:, :, ::4], bits, format) for rows in (key, value)]
    rounded = [study.rounded(rows, bits, format, *pair) for rows, pair in zip((key, value), pairs, strict=True)]
    expected, _ = study.attention(None)(None, query, *rounded, None, 0.2)

    def by_token(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2).numpy()

    scales = [(scale[None] if per_channel else scale[:1, 0, 0]).contiguous().numpy() for _, scale in pairs]
    out, *_ = grouped_query(*map(by_token, (query, key, value)), *scales, 4, 2, 0.2, bits)
    assert torch.allclose(torch.from_numpy(out), expected.flatten(2), atol=1e-5)
