"""Rotation computes the same: in float64 to 1e-9, for every variant, tied and untied, grouped queries, odd widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from diffbit import models
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import Symmetries
from diffbit.quantize import Scheme, load, quantize_checkpoint
from diffbit.quantize.methods import _rotation as hadamard
from diffbit.quantize.methods import rotate, rotate_heads
from diffbit.quantize.methods._rotation import Rotation
from diffbit.runtime import verify

from ...configs import BIASES
from ...export.helpers import relative_error, write_model
from ..transforms import config_of, logits64, random_decoder, random_ids, transformed

VARIANTS = ("softmax", "diff_v1", "diff_v2")
SHAPES = {
    "grouped": {},
    "single": {"num_kv_heads": 4},
    "tied": {"tie_embeddings": True, "num_kv_heads": 1},
    "odd": {"hidden_size": 60, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "intermediate_size": 44},
    "prime": {"hidden_size": 37, "head_dim": 6, "intermediate_size": 29},
    "sub_norms": {"sub_norms": True, "mlp": "relu2"},
    "biases": {"num_kv_heads": 1, **BIASES},
    "qk_norm": {"qk_norm_eps": 1e-6, "qkv_bias": True},
}


SCHEME = Scheme(weights=parse_format("int3_g16"))


@pytest.mark.parametrize("width", [1, 2, 7, 12, 37, 64, 96, 256])
def test_the_matrix_is_orthogonal_and_flat(width: int, monkeypatch: MonkeyPatch) -> None:
    rotation = Rotation(width, 3)
    matrix = rotation.right(torch.eye(width).double())
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width).double(), rtol=0, atol=1e-13)
    assert matrix.abs().max() <= (2 / width) ** 0.5 + 1e-12
    x, scale = torch.randn(5, width).double(), torch.rand(width).double()
    torch.testing.assert_close(rotation.right(x), x @ matrix)
    torch.testing.assert_close(rotation.right(x, scale), (x * scale) @ matrix)
    torch.testing.assert_close(rotation.left_inverse(x.T), matrix.T @ x.T)
    torch.testing.assert_close(rotation.right_inverse(rotation.right(x)), x)
    assert torch.equal(rotation.right(x.bfloat16()), rotation.right(x.bfloat16().double()).float())
    monkeypatch.setattr(hadamard, "BLOCK", 2 * width)  # two rows at a time
    torch.testing.assert_close(rotation.right(x), x @ matrix)
    if width > 4:
        assert not torch.equal(matrix, Rotation(width, 4).right(torch.eye(width).double()))
        assert torch.equal(matrix, Rotation(width, 3).right(torch.eye(width).double()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", VARIANTS)
def test_logits_stay(attention: str, shape: str) -> None:
    decoder = random_decoder(config_of(attention, **SHAPES[shape]), dtype=torch.float64)
    ids = random_ids()
    rotated = transformed(decoder, rotate, SCHEME)
    assert not rotated.config.tie_embeddings
    torch.testing.assert_close(logits64(rotated, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    for name, parameter in rotated.named_parameters():
        kept = ("lambda_q", "lambda_k", "sub_norm", "q_norm", "k_norm", "gate_proj.bias", "up_proj.bias")
        kept += ("q_proj.bias", "k_proj.bias") if rotated.config.layers[0].mixer.qk_norm_eps else ()
        if not any(part in name for part in kept):
            assert not torch.equal(parameter, decoder.state_dict().get(name, torch.zeros(0))), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", VARIANTS)
def test_logits_stay_when_only_heads_are_rotated(attention: str, shape: str) -> None:
    decoder = random_decoder(config_of(attention, **SHAPES[shape]), dtype=torch.float64)
    rotated, ids = transformed(decoder, rotate_heads, SCHEME), random_ids()
    assert rotated.config == decoder.config  # a tie stays
    torch.testing.assert_close(logits64(rotated, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    changed = {name for name, p in rotated.state_dict().items() if not torch.equal(p, decoder.state_dict()[name])}
    values = set() if shape == "sub_norms" else {"v_proj", "o_proj"}  # a norm with weights stands between them
    turned = set() if shape == "qk_norm" else {"q_proj", "k_proj"}  # whose weights tell a pair's rows apart
    assert {name.split(".")[-2] for name in changed} == turned | values
    biases = {name.split(".")[-2] for name in changed if name.endswith("bias")}
    assert biases == {"biases": turned | {"v_proj"}, "qk_norm": {"v_proj"}}.get(shape, set())


@pytest.mark.parametrize("attention", VARIANTS)
def test_logits_stay_in_float32(attention: str) -> None:
    decoder, ids = random_decoder(config_of(attention)), random_ids()
    with torch.inference_mode():
        expected, logits = decoder(ids), transformed(decoder, rotate)(ids)
    assert float((logits - expected).abs().max() / expected.std()) < 1e-5


@pytest.mark.parametrize(
    ("attention", "kv_heads"), [*((attention, 2) for attention in VARIANTS), ("diff_v1", 4), ("softmax", 1)]
)
def test_queries_and_keys_are_turned_by_the_best_angle(attention: str, kv_heads: int, monkeypatch: MonkeyPatch) -> None:
    """One plane after the other, each angle tried on all rows that share it."""
    decoder = random_decoder(config_of(attention, num_kv_heads=kv_heads), dtype=torch.float64)
    rotated = transformed(decoder, rotate, SCHEME).model.layers[1].self_attn
    monkeypatch.setattr(rotate_heads, "ANGLES", (0.0,))
    plain = transformed(decoder, rotate, SCHEME).model.layers[1].self_attn
    query, key = (p.weight.detach().view(-1, 2, 4, 64) for p in (plain.q_proj, plain.k_proj))  # d = 8
    format, errors = SCHEME.weights, [0.0, 0.0]
    for k in range(len(key)):
        pairs = len(query) // len(key)
        if attention == "diff_v1":  # signal with signal, noise with noise
            queries = [2 * (k // 2 * pairs + i) + k % 2 for i in range(pairs)]
        else:
            queries = [k * pairs + i for i in range(pairs)]
        for plane in range(4):
            best, least = None, float("inf")
            for step in range(16):
                angle = torch.tensor(step * torch.pi / 32).double()
                turn = torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
                rows = [turn @ query[q, :, plane] for q in queries] + [turn @ key[k, :, plane]]
                lost = [(format.nearest(r, *format.fit(r)).dequantize().double() - r).square().sum() for r in rows]
                size = [r.square().sum() for r in rows]
                loss = sum(lost[i] * size[-1] + size[i] * lost[-1] for i in range(len(queries)))
                errors[0] += float(loss) if step == 0 else 0.0
                if loss < least * (1 - 1e-9):
                    best, least = rows, loss
            errors[1] += float(least)
            planes = [rotated.q_proj.weight.view(-1, 2, 4, 64)[q, :, plane] for q in queries]
            planes.append(rotated.k_proj.weight.view(-1, 2, 4, 64)[k, :, plane])
            torch.testing.assert_close(torch.stack(planes).detach(), torch.stack(best), rtol=0, atol=1e-6)
    assert errors[1] < 0.97 * errors[0]


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
    rotated = transformed(decoder, rotate)
    before, after = (d.model.embed_tokens.weight.square().mean(0) for d in (decoder, rotated))
    assert before.max() > 200 * before.mean()
    assert after.max() < 3 * after.mean()


def test_an_attention_that_does_not_fit_is_refused(monkeypatch: MonkeyPatch) -> None:
    """A variant whose file claims what its arithmetic does not hold: diff_v1's head norm let pass no other width."""
    monkeypatch.setattr(diff_v1.Options, "symmetries", lambda self: Symmetries(value_width=32))
    with pytest.raises(DiffbitError, match=r"model.layers.0: .* changes the output of 'diff_v1' by \d"):
        transformed(random_decoder(config_of("diff_v1")), rotate)


@pytest.mark.parametrize("wrong", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_wrong_partners_are_refused(wrong: tuple[int, ...], monkeypatch: MonkeyPatch) -> None:
    right = (0, 1, 0, 1) if wrong == (0, 0, 1, 1) else (0, 0, 1, 1)
    attention = "diff_v1" if right == (0, 1, 0, 1) else "diff_v2"
    decoder = random_decoder(config_of(attention, num_heads=2, num_kv_heads=1 if attention == "diff_v1" else 2))
    assert decoder.config.layers[0].symmetries().key_of == right
    options = models.attention_options(attention)
    monkeypatch.setattr(options, "symmetries", lambda self: Symmetries(key_of=wrong))
    with pytest.raises(DiffbitError, match="changes the output"):
        transformed(decoder, rotate, SCHEME)


def test_a_variant_that_says_nothing_keeps_its_values(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delattr(diff_v1.Options, "symmetries")
    decoder, ids = random_decoder(config_of("diff_v1"), dtype=torch.float64), random_ids()
    rotated = transformed(decoder, rotate)
    torch.testing.assert_close(logits64(rotated, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    stream = Rotation(64, rotate.SEED)
    layer, was = rotated.model.layers[1], decoder.model.layers[1]
    expected = stream.right(was.self_attn.v_proj.weight * was.input_layernorm.weight)
    torch.testing.assert_close(layer.self_attn.v_proj.weight, expected)


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_rotated_artifact_computes_what_torch_does(attention: str, tmp_path: Path) -> None:
    config = config_of(attention, tie_embeddings=True)
    source = write_model(tmp_path / "float", config)
    scheme = Scheme(weights=parse_format("int8"))
    quantize_checkpoint(source, tmp_path / "int8", scheme, method="rotate")
    float_model, quantized = models.load(source), load(tmp_path / "int8")
    assert not quantized.config.tie_embeddings
    with torch.inference_mode():
        error = relative_error(quantized(random_ids()).numpy(), float_model(random_ids()))
    assert np.median(error) < 0.1
    quantize_checkpoint(source, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")), method="rotate")
    assert verify(export_artifact(tmp_path / "int4", tmp_path / "onnx")).passed
