"""Training with mixers that have an auxiliary loss, such as a router's balance loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diffbit.apps.train.data import TrainingRows
from diffbit.apps.train.folder import read_log
from diffbit.apps.train.head_norm import add_gains
from diffbit.apps.train.initialize import initialize
from diffbit.apps.train.trainer import auxiliary_loss, train
from diffbit.calib_data import load_text, load_tokenizer
from diffbit.models import Decoder, ModelConfig, load

from .toy import options


def test_auxiliary_loss_has_weight_one_hundredth(text: str, tmp_path: Path) -> None:
    """Of version 1 with gains, which a checkpoint after step 3 folds into a copy of the model."""
    model = ModelConfig.uniform(
        vocab_size=288, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, intermediate_size=64,
        max_position=32, attention="moh_diff_v1", shared_heads=1, top_k=2, tie_embeddings=True,
    )  # fmt: skip
    config = options(text, model=model, steps=4, head_gain=1.0)
    train(config, tmp_path / "out")
    log = read_log(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    eos = tokenizer.eos_id
    pieces = [[eos], *([*ids, eos] for ids in tokenizer.encode(load_text(text, "train").documents))]
    ids = torch.from_numpy(TrainingRows(np.concatenate(pieces), 16, seed=1).take(0, 4)[0])
    decoder = Decoder(model)
    initialize(decoder, 1)
    add_gains(decoder, 1.0)
    routed: list[Tensor] = []
    for layer in decoder.model.layers:
        layer.self_attn.router_proj.register_forward_hook(lambda module, x, out: routed.append(out[..., 1:4]))
    logits = decoder(ids[:, :-1])
    balance = []
    for part in routed:
        chosen = [set(row.argsort()[1:].tolist()) for row in part.flatten(0, 1)]
        shares = torch.tensor([sum(head in on for on in chosen) / len(chosen) for head in range(3)])
        balance.append(3 * (shares * part.softmax(-1).mean((0, 1))).sum())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    auxiliary = torch.stack(balance).mean()
    assert log[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert log[0]["auxiliary_loss"] == pytest.approx(auxiliary.item(), rel=1e-5)
    norms = []
    for whole in (loss + 0.01 * auxiliary, loss):
        gradients = torch.autograd.grad(whole, list(decoder.parameters()), retain_graph=True)
        norms.append(sum(float(g.double().square().sum()) for g in gradients) ** 0.5)
    assert log[0]["grad_norm"] == pytest.approx(norms[0], rel=1e-6)
    assert norms[1] != pytest.approx(norms[0], rel=1e-5)
    assert load(tmp_path / "out").config.layers[0].mixer.top_k == 2


def test_there_is_none_without_such_mixers(text: str, tmp_path: Path) -> None:
    config = options(text, steps=1, warmup=1)
    train(config, tmp_path / "out")
    assert "auxiliary_loss" not in read_log(tmp_path / "out")[0]
    assert auxiliary_loss(Decoder(config.model)) == 0
