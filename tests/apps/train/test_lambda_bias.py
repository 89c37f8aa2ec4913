"""`train --lambda-bias`: where it starts, that it is trained and saved, and which models refuse it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffbit.apps.train.initialize import initialize
from diffbit.apps.train.presets import train_config
from diffbit.apps.train.trainer import train
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, load

from .toy import model, options


def test_it_starts_there_and_is_trained(text: str, tmp_path: Path) -> None:
    config = options(text, model=model("diff_v2", lambda_bias=True), lambda_bias=-6.0)
    fresh = Decoder(config.model)
    initialize(fresh, config.seed, lambda_bias=-6.0)
    without = Decoder(model("diff_v2"))
    initialize(without, config.seed)
    for name, parameter in without.named_parameters():  # the bias changes no other initial weight
        assert torch.equal(parameter, fresh.get_parameter(name))
    train(config, tmp_path / "run")
    for layer in load(tmp_path / "run").model.layers:
        bias = layer.self_attn.lambda_proj.bias
        assert ((bias + 6).abs() < 0.5).all() and not (bias == -6).all()


def test_options(trained: Callable[[str], Path]) -> None:
    config = train_config("tiny", "diff_v2", lambda_bias=-6.0)
    assert config.lambda_bias == -6 and config.model.layers[0].mixer.lambda_bias
    assert not train_config("tiny", "diff_v2").model.layers[0].mixer.lambda_bias
    with pytest.raises(DiffbitError, match="lambda_bias is True, but softmax has no such option"):
        train_config("tiny", "softmax", lambda_bias=-6.0)
    with pytest.raises(DiffbitError, match="lambda_bias is nan"):
        train_config("tiny", "diff_v2", lambda_bias=float("nan"))
    with pytest.raises(DiffbitError, match=r"lambda_bias is -6\.0, wanted none with init"):
        train_config("tiny", "diff_v2", init=str(trained("diff_v2")), lambda_bias=-6.0)
