"""Rotation computes the same: in float64 to 1e-9, for every variant, tied and untied, grouped queries, odd widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit import models
from diffbit.errors import DiffbitError
from diffbit.export import export_artifact
from diffbit.models.symmetries import Symmetries
from diffbit.quantize import Scheme, load, parse_format, quantize_checkpoint
from diffbit.quantize.hadamard import Rotation
from diffbit.quantize.methods import rotate
from diffbit.runtime import verify

from ..export.helpers import relative_error, write_model
from .transforms import config_of, logits64, random_decoder, random_ids, transformed

VARIANTS = ("softmax", "diff_v1", "diff_v2")
SHAPES = {
    "grouped": {},
    "single": {"num_kv_heads": 4},
    "tied": {"tie_embeddings": True, "num_kv_heads": 1},
    "odd": {"hidden_size": 60, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "intermediate_size": 44},
    "prime": {"hidden_size": 37, "head_dim": 6, "intermediate_size": 29},
}


@pytest.mark.parametrize("width", [1, 2, 7, 12, 37, 64, 96, 256])
def test_the_matrix_is_orthogonal_and_flat(width: int) -> None:
    rotation = Rotation(width, 3)
    matrix = rotation.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width).double(), rtol=0, atol=1e-13)
    assert matrix.abs().max() <= (2 / width) ** 0.5 + 1e-12
    x = torch.randn(5, width)
    torch.testing.assert_close(rotation.right(x), x.double() @ matrix)
    torch.testing.assert_close(rotation.left_inverse(x.T), matrix.T @ x.T.double())
    torch.testing.assert_close(rotation.right_inverse(rotation.right(x)), x.double())
    if width > 4:
        assert not torch.equal(matrix, Rotation(width, 4).matrix())
        assert torch.equal(matrix, Rotation(width, 3).matrix())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", VARIANTS)
def test_logits_stay(attention: str, shape: str) -> None:
    decoder = random_decoder(config_of(attention, **SHAPES[shape]), dtype=torch.float64)
    ids = random_ids()
    made = transformed(decoder, rotate)
    assert not made.config.tie_embeddings
    torch.testing.assert_close(logits64(made, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    for name, parameter in made.named_parameters():
        if "lambda_q" not in name and "lambda_k" not in name:
            assert not torch.equal(parameter, decoder.state_dict().get(name, torch.zeros(0))), name


@pytest.mark.parametrize("attention", VARIANTS)
def test_logits_stay_in_float32(attention: str) -> None:
    decoder, ids = random_decoder(config_of(attention)), random_ids()
    with torch.inference_mode():
        wanted, found = decoder(ids), transformed(decoder, rotate)(ids)
    assert float((found - wanted).abs().max() / wanted.std()) < 1e-5


def test_each_kv_head_has_a_rotation_of_its_own() -> None:
    """Else a wrong group among the heads that share a value would go unnoticed."""
    decoder = random_decoder(config_of("diff_v1"))
    with torch.no_grad():
        value = decoder.model.layers[0].self_attn.v_proj.weight
        value[16:] = value[:16]
    first, second = transformed(decoder, rotate).model.layers[0].self_attn.v_proj.weight.split(16)
    assert not torch.allclose(first, second, atol=0.1)


def test_outlier_channels_are_spread() -> None:
    decoder = random_decoder(config_of("diff_v1", hidden_size=256))
    with torch.no_grad():
        decoder.model.embed_tokens.weight[:, 7] *= 100
    made = transformed(decoder, rotate)
    before, after = (d.model.embed_tokens.weight.square().mean(0) for d in (decoder, made))
    assert before.max() > 200 * before.mean()
    assert after.max() < 3 * after.mean()


def test_an_attention_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant whose file claims what its arithmetic does not hold: diff_v1's head norm let pass no other width."""
    monkeypatch.setattr("diffbit.models.attention.diff_v1.symmetries", lambda config: Symmetries(value_width=32))
    with pytest.raises(DiffbitError, match=r"model.layers.0.: .*'diff_v1' computes something else \(by \d"):
        transformed(random_decoder(config_of("diff_v1")), rotate)


def test_a_variant_that_says_nothing_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("diffbit.models.attention.diff_v1.symmetries")
    decoder, ids = random_decoder(config_of("diff_v1"), dtype=torch.float64), random_ids()
    made = transformed(decoder, rotate)
    torch.testing.assert_close(logits64(made, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    stream = Rotation(64, rotate.SEED)
    layer, was = made.model.layers[1], decoder.model.layers[1]
    wanted = stream.right(was.self_attn.v_proj.weight * was.input_layernorm.weight)
    torch.testing.assert_close(layer.self_attn.v_proj.weight, wanted)


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_rotated_artifact_computes_what_torch_does(attention: str, tmp_path: Path) -> None:
    config = config_of(attention, tie_embeddings=True)
    source = write_model(tmp_path / "float", config)
    scheme = Scheme(weights=parse_format("int8"))
    quantize_checkpoint(source, tmp_path / "int8", scheme, method="rotate")
    wanted, found = models.load(source), load(tmp_path / "int8")
    assert not found.config.tie_embeddings
    with torch.inference_mode():
        error = relative_error(found(random_ids()).numpy(), wanted(random_ids()))
    assert np.median(error) < 0.1
    quantize_checkpoint(source, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")), method="rotate")
    assert verify(export_artifact(tmp_path / "int4", tmp_path / "onnx")).passed
