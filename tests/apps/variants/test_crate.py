"""CRATE's two halves against their equations, token by token, and up to the artifact."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError
from diffbit.apps.variants.attention import crate
from diffbit.apps.variants.mlp import ista
from diffbit.models import Decoder, LayerSpec, ModelConfig, rope_for
from diffbit.models.mlp import swiglu
from diffbit.quantize import Scheme
from diffbit.quantize.methods import awq, rotate, rotate_heads

from ...quantize.transforms import transformed
from . import artifacts, checks

ATTENTION, MLP = crate.Options(4, 4, 16), ista.Options(64)
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    layers=(
        LayerSpec(ATTENTION, MLP),
        LayerSpec(replace(ATTENTION, qk_norm_eps=1e-6), MLP, sub_norms=True),
        LayerSpec(ATTENTION, swiglu.Options(96), norms="around"),
        LayerSpec(ATTENTION, MLP),
    ),
    max_position=64,
)


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt()


def rotated(head: Tensor, position: int) -> Tensor:
    half = len(head) // 2
    turn = torch.polar(torch.ones(half).double(), position * 10000.0 ** (-torch.arange(half).double() / half))
    pairs = torch.complex(head[:half], head[half:]) * turn
    return torch.cat((pairs.real, pairs.imag))


def by_the_book(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """A layer of a sequence x [S, E] in float64, with D^T for down_proj."""
    subspaces = weights["self_attn.q_proj.weight"].unflatten(0, (4, 16))  # U_h^T
    dictionary = weights["mlp.up_proj.weight"]
    rows = []
    for t, token in enumerate(x):
        heads = []
        for subspace in subspaces:
            seen = [subspace @ normed(other) for other in x[: t + 1]]
            query = rotated(seen[t], t)
            logits = torch.stack([query @ rotated(u, s) / math.sqrt(16) for s, u in enumerate(seen)])
            heads.append(logits.softmax(0) @ torch.stack(seen))
        z = normed(token + weights["self_attn.o_proj.weight"] @ torch.cat(heads))
        gradient = dictionary.T @ (dictionary @ z) - dictionary.T @ z  # of |z - D a|^2 / 2 at a = z
        rows.append((z - 0.1 * gradient - 0.1 * 0.1).clamp(min=0))
    return torch.stack(rows)


def test_a_layer_is_its_equations() -> None:
    layer = checks.random_decoder(CONFIG).model.layers[0]
    layer.input_layernorm.weight.fill_(1)
    layer.post_attention_layernorm.weight.fill_(1)
    layer.mlp.down_proj.weight.copy_(layer.mlp.up_proj.weight.T)
    x = torch.randn(2, 7, 64)
    out = layer(x, rope_for(CONFIG, torch.arange(7).expand(2, 7)))
    assert 0.1 < (out == 0).float().mean() < 0.9
    weights = {name: parameter.double() for name, parameter in layer.named_parameters()}
    for row in range(2):
        torch.testing.assert_close(out[row].double(), by_the_book(x[row].double(), weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "kv", "dtype", "bound"),
    [(None, "float", "fp32", 1e-4), ("int8_g32", "int8", "fp32", 0.1), (None, "float", "fp16", 0.05)],
)
def test_artifact_computes_what_torch_does(
    tmp_path: Path, weights: str | None, kv: str, dtype: str, bound: float
) -> None:
    model = checks.random_decoder(CONFIG)
    checks.check_artifact(model, tmp_path / "a", weights, dtype, bound)
    artifacts.check_session(*artifacts.artifact_of(model, tmp_path / "b", weights=weights, kv=kv, dtype=dtype), bound)


def test_methods_that_scale_or_rotate() -> None:
    scheme, ids = Scheme.from_dict({"weights": "int4_g32"}), checks.ids_of(CONFIG, 2, 9)
    config = replace(CONFIG, layers=CONFIG.layers[:2])
    model = checks.random_decoder(config)
    for method in (awq, rotate_heads):
        torch.testing.assert_close(transformed(model, method, scheme, ids)(ids), model(ids), rtol=0, atol=1e-4)
    with pytest.raises(DiffbitError, match=r"layers.0: its MLP \(ista\) computes functions of single channels"):
        transformed(model, rotate, scheme, ids)


def test_sizes_that_are_refused() -> None:
    with pytest.raises(DiffbitError, match="num_kv_heads is 2, wanted 4, as many as heads"):
        crate.Options(4, 2, 16)
    with pytest.raises(DiffbitError, match="keys_of is 0, wanted none"):
        crate.Options(4, 4, 16, keys_of=0)
    with pytest.raises(DiffbitError, match="intermediate_size is 96, wanted 64, the hidden size"):
        Decoder(replace(CONFIG, layers=(LayerSpec(ATTENTION, ista.Options(96)),)))
