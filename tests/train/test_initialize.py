"""Sub-norms put into trained models: their weights against least squares, and how little changes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.errors import DiffbitError
from diffbit.models import Decoder, load
from diffbit.train import read_log, train, train_config
from diffbit.train.initialize import initialize, insert_sub_norms

from .toy import model, options


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_weights_are_the_least_squares(attention: str) -> None:
    config = model(attention)
    source, grown = Decoder(config), Decoder(replace(config, sub_norms=True))
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
        wanted = [np.linalg.lstsq(normed[:, [c]], x[:, c], rcond=None)[0][0] for c in range(x.shape[1])]
        weight = grown.model.layers[1].get_parameter(f"{name}.weight").detach()
        assert weight.numpy() == pytest.approx(np.array(wanted), rel=1e-4)
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
    assert config.model == replace(load(path).config, sub_norms=True)
    log = read_log(train(config, tmp_path / "out").path)
    assert log[0]["loss"] < math.log(288)
    assert load(tmp_path / "out" / "master").config.sub_norms
    on = train_config("tiny", init=str(tmp_path / "out" / "master"), **changes)
    assert on.model.sub_norms
    with pytest.raises(DiffbitError, match="has sub-norms, which training cannot remove"):
        train_config("tiny", init=str(tmp_path / "out" / "master"), sub_norms=False, **changes)
