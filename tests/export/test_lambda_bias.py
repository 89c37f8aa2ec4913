"""The bias of diff_v2's lambda, with and without shared noise heads: its formula in float64, and in every graph that
computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, load
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from .helpers import config_of, relative_error, write_model

CASES: dict[str, tuple[dict[str, Any], Scheme]] = {
    "float": ({}, Scheme()),
    "int4 weights": ({}, Scheme(parse_format("int4_g32"))),
    "rounded lambda": ({}, Scheme(parse_format("int8"), overrides=(("*.lambda_proj", parse_format("int8")),))),
    "int4 cache": ({}, Scheme(attention=AttentionScheme(keys="int4", values="int4"))),
    "narrow heads": ({"head_dim": 12}, Scheme()),
    "noise of 2": ({"num_heads": 4, "num_kv_heads": 2, "noise_ratio": 2}, Scheme()),
    "noise of 4": ({"num_heads": 4, "noise_ratio": 4}, Scheme(parse_format("int4_g32"))),
    "noise of 4, int4 cache": (
        {"num_heads": 8, "num_kv_heads": 2, "noise_ratio": 4},
        Scheme(attention=AttentionScheme(keys="int4", values="int4")),
    ),
    "narrow heads, noise of 2": ({"head_dim": 12, "noise_ratio": 2}, Scheme()),
}


def write_biased(folder: Path, **changes: Any) -> Path:
    return write_model(folder, config_of("diff_v2", lambda_bias=True, **changes))


@pytest.mark.parametrize("case", CASES)
def test_artifact_matches_torch(case: str, tmp_path: Path) -> None:
    changes, scheme = CASES[case]
    source = write_biased(tmp_path / "m", **changes)
    if scheme != Scheme():
        quantize_checkpoint(source, tmp_path / "q", scheme)
        source = tmp_path / "q"
    assert (
        Checkpoint(source).config.layers[0].mixer == config_of("diff_v2", lambda_bias=True, **changes).layers[0].mixer
    )
    artifact = export_artifact(source, tmp_path / "onnx")
    assert verify(artifact).passed
    ids = torch.arange(12)[None] * 7 % 61
    with torch.inference_mode():
        expected = reference_model(source)(ids)[0, 7:]
    for native in (True, False):
        session = Session(artifact, native=native)
        logits = [session.prefill(ids[:, :8].numpy()), *(session.step(ids[:, i : i + 1].numpy()) for i in range(8, 12))]
        # a last bit of a key may round to another float16 number in a low-bit cache's residual window
        bound = 1e-3 if case == "noise of 4, int4 cache" else 1e-4
        assert relative_error(np.concatenate(logits), expected).max() < bound


def test_lambda_bias_has_its_formula(tmp_path: Path) -> None:
    source = write_biased(tmp_path / "m")
    assert Checkpoint(source).config.layers[0].mixer.lambda_bias
    attention = load(source).model.layers[0].self_attn
    x = torch.randn(1, 5, 64)
    weight, bias = attention.lambda_proj.weight.double(), attention.lambda_proj.bias.double()
    assert bias.abs().max() > 0.05
    expected = torch.sigmoid(x.double() @ weight.T + bias)  # [1, 5, H]
    torch.testing.assert_close(attention.lambda_of(x).double()[..., 0].transpose(1, 2), expected, rtol=1e-5, atol=1e-6)


def test_only_diff_v2_has_lambda_bias() -> None:
    with pytest.raises(DiffbitError, match="lambda_bias is True, but softmax has no such option"):
        config_of("softmax", lambda_bias=True)
