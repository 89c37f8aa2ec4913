"""A YOCO model (the layers of the preset of this name) against the paper's equations, and up to the artifact."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffbit.io import files
from diffbit.models import Decoder, LayerSpec, ModelConfig
from diffbit.models.attention import diff_v1, softmax
from diffbit.models.mlp import swiglu

from . import artifacts, checks


def config_of(mixer: softmax.Options | diff_v1.Options) -> ModelConfig:
    mixers = *[replace(mixer, sliding_window=5)] * 2, mixer, *[replace(mixer, keys_of=2)] * 2
    layers = tuple(LayerSpec(each, swiglu.Options(96)) for each in mixers)
    return ModelConfig(vocab_size=61, hidden_size=64, layers=layers, max_position=64)


CONFIGS = {"softmax": config_of(softmax.Options(2, 2, 16)), "diff_v1": config_of(diff_v1.Options(2, 1, 16))}


def by_the_book(model: Decoder, ids: Tensor) -> Tensor:
    """Logits [S, V] of a model of softmax attention in float64: K and V of the upper half are made once."""
    p = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    x = p["model.embed_tokens.weight"][ids]
    positions = range(len(ids))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]

    def rotated(head: Tensor, position: int) -> Tensor:
        turn = torch.polar(torch.ones(8).double(), position * 10000.0 ** (-torch.arange(8).double() / 8))
        pairs = torch.complex(head[:8], head[8:]) * turn
        return torch.cat((pairs.real, pairs.imag))

    def projected(x: Tensor, name: str) -> Tensor:
        return (x @ p[f"{name}.weight"].T).unflatten(-1, (2, 16))

    for index in range(5):
        layer = f"model.layers.{index}"
        read = norm(x, f"{layer}.input_layernorm")
        if index <= 2:  # the lower half's own, then the only ones of the upper half
            keys, values = (projected(read, f"{layer}.self_attn.{name}_proj") for name in "kv")
        queries, rows = projected(read, f"{layer}.self_attn.q_proj"), []
        for t in positions:
            seen, heads = positions[max(0, t - 4) if index < 2 else 0 : t + 1], []
            for head in range(2):
                logits = [rotated(queries[t, head], t) @ rotated(keys[s, head], s) / math.sqrt(16) for s in seen]
                heads.append(torch.stack(logits).softmax(0) @ values[seen.start : seen.stop, head])
            rows.append(p[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(heads))
        x = x + torch.stack(rows)
        read = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (read @ p[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ p[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ p["lm_head.weight"].T


def test_yoco_is_its_equations() -> None:
    model = checks.random_decoder(CONFIGS["softmax"])
    ids = checks.ids_of(model.config, 1, 12)
    torch.testing.assert_close(model(ids)[0].double(), by_the_book(model, ids[0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "weights", "kv", "bound"), [
    ("softmax", None, "float", 1e-4), ("diff_v1", None, "float", 1e-4), ("diff_v1", "int8_g32", "int8", 0.1),
])  # fmt: skip
def test_artifact_computes_what_torch_does(
    tmp_path: Path, name: str, weights: str | None, kv: str, bound: float
) -> None:
    """One layer's cache grows; the windows' have a fixed size, and the upper layers have none."""
    artifact, reference = artifacts.artifact_of(
        checks.random_decoder(CONFIGS[name], 0.12), tmp_path, weights=weights, kv=kv
    )
    artifacts.check_session(artifact, reference, bound)
    layers = files.read_json(artifact / "diffbit.json")["cache"]["layers"]
    sizes = [{buffer["shape"][1] for buffer in layer["buffers"]} for layer in layers]
    assert sizes == [{"tokens%5"}, {"tokens%5"}, {"tokens"}, set(), set()]
