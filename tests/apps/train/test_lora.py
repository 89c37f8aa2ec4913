"""Adapters of a float model: what is trained, what a run leaves, and that PEFT's layout of it is the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from diffbit import models
from diffbit.apps.train.config import TrainConfig
from diffbit.apps.train.lora import LoRALinear, adapted
from diffbit.apps.train.trainer import train
from diffbit.cli.app import main
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder

from .toy import model, options, stop_at


def test_a_layer_by_the_formula() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(8, 6), rank=3)
    assert not layer.up.any()
    nn.init.normal_(layer.up)
    x = torch.randn(5, 8)
    weight = layer.weight.double() + layer.up.double() @ layer.down.double()
    wanted = x.double() @ weight.T + layer.bias.double()
    for made in (layer, layer.merged()):
        torch.testing.assert_close(made(x).double(), wanted, rtol=0, atol=1e-5)


def start(text: str, out: Path, attention: str) -> TrainConfig:
    """A run that trains adapters of a model with random weights."""
    config = options(text, attention)
    torch.manual_seed(2)
    first = train(replace(config, steps=1, warmup=1), out).path
    models.save(Decoder(model(attention)), out / "base", tokenizer_from=first)
    base = str(out / "base")
    return replace(config, init=base, tokenizer=base, trainable="lora", rank=3, learning_rate=2e-2)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_a_run_changes_linear_layers_by_a_low_rank_and_resumes_bit_for_bit(
    text: str, tmp_path: Path, attention: str
) -> None:
    config = start(text, tmp_path / "first", attention)
    result = train(config, tmp_path / "whole")
    assert config.init is not None
    before, after = models.load(config.init), models.load(result.path)
    layers = set(adapted(config.model))
    assert len(layers) == 2 * 7
    for name, weight in before.state_dict().items():
        delta = after.state_dict()[name] - weight
        if name.removesuffix(".weight") in layers:
            ranks = torch.linalg.svdvals(delta.double())
            assert ranks[2] > 100 * ranks[3]
        else:
            assert not delta.any(), name
    assert result.losses[-1] < result.losses[0]

    # the adapter in PEFT's layout, merged into the base, is the same model
    tensors = load_file(result.path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(layers)
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (3, 64)
    merged = models.load(Checkpoint(config.init, result.path / "adapter"))
    for name, weight in after.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weight, rtol=0, atol=1e-6)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 5)
        train(config, tmp_path / "stopped")
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert resumed.losses == result.losses and Checkpoint(resumed.path).sha256() == Checkpoint(result.path).sha256()
    written = (path / "adapter" / "adapter_model.safetensors" for path in (resumed.path, result.path))
    assert len({file.read_bytes() for file in written}) == 1


def test_adapters_of_some_layers_only(text: str, tmp_path: Path) -> None:
    config = start(text, tmp_path / "first", "softmax")
    path = train(replace(config, only="*.layers.1.*.q_proj.*, *.up_proj.*"), tmp_path / "out").path
    described = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert described["target_modules"] == [
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (3, 3, config.init)
    path = train(replace(config, only="*.up_proj.*"), tmp_path / "names").path
    assert json.loads((path / "adapter" / "adapter_config.json").read_text())["target_modules"] == ["up_proj"]
    with pytest.raises(DiffbitError, match="names no linear layer that can have an adapter"):
        train(replace(config, only="*norm*"), tmp_path / "none")


def test_what_does_not_go_together(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DiffbitError, match=r"wanted a trained model to start from \(--init\)"):
        options(text, trainable="lora")
    with pytest.raises(DiffbitError, match="rank is 0"):
        options(text, trainable="lora", rank=0)
    for arguments, sentence in (
        (["--lora", "4", "--trainable", "scales", "--qat", "int4_g32"], "--lora trains adapters"),
        (["--lora", "4"], "--init"),
        (["--trainable", "scales"], "--qat"),
        (["--lora", "4", "--qat", "int7_g64", "--init", str(tmp_path)], "use int8_g64"),  # only read from checkpoints
        (["--trainable", "lora", "--qat", "int4_g16", "--init", str(tmp_path)], "use int4_g32"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments, "--data", text, "--quiet", "-o", str(tmp_path / "out")])
        assert end.value.code == 2 and sentence in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
