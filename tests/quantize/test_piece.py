"""The engine: the same bits from a folder and in memory; tied heads and transforms; what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffbit import models
from diffbit.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.quantize import (
    CalibStats,
    Format,
    QTensor,
    Scheme,
    apply,
    load,
    parse_format,
    quantize_checkpoint,
    read_weight,
    rtn,
)
from diffbit.quantize.piece import FINAL_NORM, Piece

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=128,
    attention="diff_v1",
)  # fmt: skip
ATTENTIONS = ["softmax", "diff_v1", "diff_v2"]
IDS = torch.randint(96, (5, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(20) < torch.tensor([20, 20, 7, 20, 13])[:, None]
INT4 = Scheme(weights=parse_format("int4_g32"))
WITH_HEAD = replace(INT4, overrides=(("lm_head", parse_format("int8")),))


def make(config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.mul_(4)
    return decoder


def by_activations(weight: torch.Tensor, format: Format, stats: CalibStats) -> QTensor:
    """A rounding that shows in its result what statistics it was given."""
    return rtn(weight * (1 + stats.gram.diagonal().sqrt() / 8 + stats.mean_abs / 8 + stats.absmax / 64), format)


def untie(piece: Piece) -> None:
    """The final norm's weight into the head."""
    if FINAL_NORM in piece.tensors:
        norm = piece.tensors[FINAL_NORM].float()
        piece.tensors["lm_head.weight"] = piece.tensors["lm_head.weight"].float() * norm
        piece.tensors[FINAL_NORM] = torch.ones_like(norm)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that are not in the folder."""
    made: dict[str, Any] = {
        "untie": SimpleNamespace(
            transform=untie, config=lambda config: replace(config, tie_embeddings=False), CALIBRATED=False
        ),
        "forgets": SimpleNamespace(transform=untie, CALIBRATED=False),
        "needs": SimpleNamespace(quantize=by_activations, CALIBRATED=True),
    }
    folder = sys.modules["diffbit.quantize.methods"]
    monkeypatch.setattr(folder, "methods", lambda: ("rtn", *made))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, f"diffbit.quantize.methods.{name}", module)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("scheme", [INT4, WITH_HEAD], ids=["layers", "head"])
@pytest.mark.parametrize("method", ["rtn", "needs", "untie+needs"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_folder_and_memory_give_the_same_bits(
    attention: str, method: str, scheme: Scheme, tie: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    models.save(make(replace(CONFIG, attention=attention, tie_embeddings=tie)), tmp_path / "float", dtype=dtype)
    source = models.load(tmp_path / "float", dtype=dtype)
    options = {} if method == "rtn" else {"calibration": IDS, "calibration_mask": MASK}
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", scheme, method=method, **options)
    stored = Checkpoint(tmp_path / "q")
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    applied = apply(source, scheme, method, *options.values())
    assert all(torch.equal(source.state_dict()[name], tensor) for name, tensor in before.items())
    untied = not tie or scheme is WITH_HEAD or method == "untie+needs"
    assert applied.config.tie_embeddings == stored.config.tie_embeddings == (not untied)
    for name in models.layout.shapes(applied.config):
        found = read_weight(stored, name)
        if isinstance(found, QTensor):
            wanted = applied.get_submodule(name.removesuffix(".weight")).weight
            assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scale, wanted.scale)
        else:
            assert found.dtype == applied.get_parameter(name).dtype
            assert torch.equal(found, applied.get_parameter(name))
    assert torch.equal(load(tmp_path / "q", dtype=dtype)(IDS), applied(IDS))


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("tie", [False, True])
def test_a_transform_is_exact_and_may_untie(tie: bool) -> None:
    exact = make(replace(CONFIG, tie_embeddings=tie))
    changed = apply(exact, replace(INT4, weights=None, overrides=(("lm_head", parse_format("int8")),)), "untie")
    assert (changed.model.norm.weight == 1).all()
    folded = exact.head(exact.embed(IDS)), changed.head(changed.embed(IDS))
    assert (folded[0] - folded[1]).abs().max() < 0.02 * folded[0].abs().max()


@pytest.mark.usefixtures("made_up")
def test_refusals(tmp_path: Path) -> None:
    tied = make(replace(CONFIG, tie_embeddings=True))
    models.save(tied, tmp_path / "float")
    with pytest.raises(DiffbitError, match="'forgets' changes the embedding that the head shares"):
        apply(tied, INT4, "forgets")
    with pytest.raises(DiffbitError, match=r"'untie\+needs' needs calibration text: pass --calibrate"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "q", INT4, method="untie+needs")
    with pytest.raises(DiffbitError, match="'needs' needs calibration text"):
        apply(tied, INT4, "needs")
    assert [path.name for path in tmp_path.iterdir()] == ["float"]
