"""Small runs that the tests of training share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diffbit.apps.train import trainer as trainer_module
from diffbit.apps.train.config import TrainConfig
from diffbit.models import ModelConfig

from ...configs import resized


def model(attention: str = "diff_v1", **changes: Any) -> ModelConfig:
    heads = 4 if attention == "softmax" else 2
    config = ModelConfig.uniform(
        vocab_size=288,
        hidden_size=32,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=8,
        intermediate_size=64,
        max_position=32,
        attention=attention,
        tie_embeddings=True,
    )
    return resized(config, **changes)


def options(source: str, attention: str = "diff_v1", **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=model(attention),
        steps=8,
        length=16,
        batch_size=4,
        warmup=2,
        source=source,
        device="cpu",
        eval_windows=8,
        checkpoint_every=3,
        seed=1,
    )
    return replace(config, **changes)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt the run when it is about to take a step."""
    step_of_run = trainer_module._Run.step

    def interrupted(self: Any, number: int) -> dict[str, Any]:
        if number == step:
            raise KeyboardInterrupt
        return step_of_run(self, number)

    monkeypatch.setattr(trainer_module._Run, "step", interrupted)
