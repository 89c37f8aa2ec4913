"""Initial weights: their spread, and sub-norms of trained models against least squares."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.train.folder import read_log
from diffbit.apps.train.initialize import initialize, insert_sub_norms
from diffbit.apps.train.presets import train_config
from diffbit.apps.train.trainer import train
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, load

from ...configs import resized
from .toy import model, options


def test_initial_weights_have_their_spread() -> None:
    decoder = Decoder(model(hidden_size=256, intermediate_size=512, num_layers=8))
    initialize(decoder, seed=0, o_proj=0.1)
    std = math.sqrt(2 / (5 * 256))
    state = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    layer = "model.layers.3."
    assert float(state["model.embed_tokens.weight"].std()) == pytest.approx(std, rel=0.05)
    assert float(state[layer + "mlp.up_proj.weight"].std()) == pytest.approx(std, rel=0.05)
    assert float(state[layer + "mlp.down_proj.weight"].std()) == pytest.approx(std / 4, rel=0.05)
    assert float(state[layer + "self_attn.o_proj.weight"].std()) == pytest.approx(std / 40, rel=0.1)
    assert (state["model.norm.weight"] == 1).all()
    vectors = torch.cat([p for name, p in state.items() if "lambda_" in name])
    assert vectors.dtype == torch.float32 and float(vectors.std()) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_weights_of_sub_norms_are_the_least_squares(attention: str) -> None:
    config = model(attention)
    source, grown = Decoder(config), Decoder(resized(config, sub_norms=True))
    initialize(source, 0)
    ids = torch.randint(288, (3, 20), generator=torch.Generator().manual_seed(0))
    insert_sub_norms(source, grown, ids)
    for name in ("self_attn.attn_sub_norm", "mlp.ffn_sub_norm"):
        seen: list[torch.Tensor] = []
        source.model.layers[1].get_submodule(name).register_forward_hook(lambda m, i, out, seen=seen: seen.append(out))
        with torch.no_grad():
            source(ids)
        x = seen[0].flatten(0, 1).double().numpy()
        normed = x / np.sqrt((x**2).mean(1, keepdims=True) + config.norm_eps)
        expected = [np.linalg.lstsq(normed[:, [c]], x[:, c], rcond=None)[0][0] for c in range(x.shape[1])]
        weight = grown.model.layers[1].get_parameter(f"{name}.weight").detach()
        assert weight.numpy() == pytest.approx(np.array(expected), rel=1e-4)
        if attention == "diff_v1" and name == "self_attn.attn_sub_norm":  # behind a norm of every head
            assert weight.numpy() == pytest.approx(1.0, rel=0.01)
    for name, parameter in source.named_parameters():
        assert torch.equal(parameter, grown.get_parameter(name))
    with torch.no_grad():
        changed = (grown(ids) - source(ids)).norm() / source(ids).norm()
        for norm in (module for name, module in grown.named_modules() if name.endswith("sub_norm")):
            norm.weight.fill_(1.0)  # type: ignore[union-attr, operator]
        unfitted = (grown(ids) - source(ids)).norm() / source(ids).norm()
    assert changed < 0.35 * unfitted


def test_a_run_from_a_checkpoint_without_them(text: str, tmp_path: Path) -> None:
    first = train(options(text, "diff_v1", steps=30, learning_rate=1e-2), tmp_path / "float")
    path = str(first.path)
    changes = {"source": text, "qat": "ternary", "steps": 2, "batch_size": 4, "device": "cpu", "eval_windows": 8}
    config = train_config("tiny", init=path, sub_norms=True, **changes)
    assert config.model == resized(load(path).config, sub_norms=True)
    log = read_log(train(config, tmp_path / "out").path)
    assert log[0]["loss"] < math.log(288)
    assert load(tmp_path / "out" / "master").config.sub_norms
    on = train_config("tiny", init=str(tmp_path / "out" / "master"), **changes)
    assert on.model.sub_norms
    with pytest.raises(DiffbitError, match="has sub-norms, which training cannot remove"):
        train_config("tiny", init=str(tmp_path / "out" / "master"), sub_norms=False, **changes)
