"""A ternary artifact computes the integers of the model that was trained.

The training forward's activations, steps, sums, weights and scales against those of the exported graph, element for
element, layer by layer, on trained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from diffbit.apps.train import qat
from diffbit.apps.train.config import TrainConfig
from diffbit.apps.train.folder import MASTER
from diffbit.apps.train.trainer import train
from diffbit.export import export_artifact
from diffbit.formats.rounding import spread
from diffbit.models import Checkpoint, Decoder, ModelConfig, load
from diffbit.quantize import read_scheme
from diffbit.runtime import native

from .helpers import VARIANTS
from .visible import ternary_calls, through_a_kernel

SENTENCE = "def function_{}(self, value={}):\n    return self.items[{}] + value\n"


class Trained(NamedTuple):
    model: Decoder  # as the trainer runs it, put together again from the float weights
    artifact: Path
    ids: np.ndarray  # int64 [B, S]


class Forward(NamedTuple):
    """What a QATLinear did in its forward pass, from what it kept for the backward one."""

    q: np.ndarray
    a: np.ndarray
    sums: np.ndarray
    weight: np.ndarray  # int8 [N, K]
    scale: np.ndarray
    y: np.ndarray


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """trained("diff_v1", "int8"): a model after a few steps at a high rate, and its artifact."""
    folder = tmp_path_factory.mktemp("exact")
    text = folder / "text.txt"
    draw = np.random.default_rng(0).integers(0, 1000, (400, 3))
    text.write_text("".join(SENTENCE.format(*row) for row in draw))
    models: dict[tuple[str, ...], Trained] = {}

    def make(attention: str, activations: str, mlp: str) -> Trained:
        key = attention, activations, mlp
        if key in models:
            return models[key]
        config = ModelConfig.uniform(
            vocab_size=288, hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
            intermediate_size=160, max_position=32, attention=attention, mlp=mlp, sub_norms=True, tie_embeddings=True,
        )  # fmt: skip
        run = folder / "-".join(key)
        options = TrainConfig(
            model=config, steps=12, length=16, batch_size=4, learning_rate=2e-2, warmup=2, source=str(text),
            qat="ternary", activations=activations, schedule="two_stage", device="cpu", eval_windows=2,
            checkpoint_every=0,
        )  # fmt: skip
        train(options, run)
        scheme = read_scheme(Checkpoint(run))
        assert scheme is not None
        model = load(run / MASTER).train()
        qat.prepare(model, scheme)
        ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 16))
        models[key] = Trained(model, export_artifact(run, run.with_name(f"{run.name}-onnx")), ids)
        return models[key]

    return make


def forward(layer: qat.QATLinear, x: np.ndarray) -> Forward:
    sums = []

    def product(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sums.append(qat_product(q, weight))
        return sums[-1]

    qat_product = qat.integer_product
    with mock.patch.object(qat, "integer_product", product):
        y = layer(torch.tensor(x))
    assert y.grad_fn is not None
    q, a, signs, scale = y.grad_fn.saved_tensors
    return Forward(
        q.numpy(), a.numpy(), sums[0].numpy().reshape(y.shape), signs.numpy(), scale.numpy().reshape(1),
        y.detach().numpy(),
    )  # fmt: skip


def same(actual: np.ndarray | None, expected: np.ndarray) -> bool:
    return actual is not None and actual.shape == expected.shape and bool((actual == expected).all())


every_model = pytest.mark.parametrize(
    ("attention", "activations", "mlp"),
    [
        ("diff_v1", "int8", "swiglu"),
        *(
            pytest.param(attention, *rest, marks=pytest.mark.slow)
            for attention in VARIANTS
            for rest in (("int8", "swiglu"), ("int4", "relu2"))
            if (attention, rest[0]) != ("diff_v1", "int8")
        ),
    ],
)


@every_model
def test_the_body_computes_what_was_trained(
    trained: Callable[..., Trained], attention: str, activations: str, mlp: str
) -> None:
    model, artifact, ids = trained(attention, activations, mlp)
    calls = ternary_calls(artifact, ids)
    assert len(calls) == 7 * model.config.num_layers
    for module, call in calls.items():
        layer = model.get_submodule(f"model.{module}")
        numbers = forward(layer, call.x)
        assert same(call.spread, spread(torch.from_numpy(call.x), layer.rounding).numpy()), module
        assert same(call.q, numbers.q), module
        assert same(call.a, numbers.a), module
        assert same(call.weight, numbers.weight.T), module
        assert same(call.sums, numbers.sums), module
        assert same(call.scale, numbers.scale), module
        assert same(call.y, numbers.y), module


@every_model
def test_the_kernels_compute_what_was_trained(
    trained: Callable[..., Trained], attention: str, activations: str, mlp: str
) -> None:
    assert native.library() is not None
    model, artifact, ids = trained(attention, activations, mlp)
    for isa in native.instruction_sets():
        for some in (ids, ids[:1, :1]):  # a prompt and a step: kernels have a way of their own for few rows
            for module, call in ternary_calls(artifact, some, isa).items():
                layer = model.get_submodule(f"model.{module}")
                numbers = forward(layer, call.x)
                q, a, sums = through_a_kernel(call, isa)
                assert same(call.spread, spread(torch.from_numpy(call.x), layer.rounding).numpy()), (isa, module)
                assert same(q, numbers.q), (isa, module)
                assert same(a, numbers.a), (isa, module)
                assert same(sums, numbers.sums), (isa, module)
                assert same(call.scale, numbers.scale), (isa, module)
                assert same(call.y, numbers.y), (isa, module)
