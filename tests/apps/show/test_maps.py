"""The maps against an attention that is written out in float64, number by number, from the model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.show.document import document
from diffbit.apps.show.maps import Run, run
from diffbit.calib_data import load_tokenizer
from diffbit.formats import parse_format
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import AttentionScheme, Scheme, apply, load

from .pages import PROMPT, maps_of

EXACT = 1e-5  # between float32 and float64


def slow(decoder: Decoder, whole: Run, ids: list[int], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(weights [H, branches, T, T], what multiplies the values [H, T, T]) of a layer, from what it reads."""
    config, mixer = decoder.config, decoder.config.layers[layer].mixer
    weight = {name: tensor.double().numpy() for name, tensor in decoder.model.layers[layer].state_dict().items()}
    table = decoder.model.embed_tokens.weight.detach().double().numpy()
    x = table[ids] if layer == 0 else whole.hidden[layer - 1].double().numpy()
    x = np.stack([row / math.sqrt((row**2).mean() + config.norm_eps) * weight["input_layernorm.weight"] for row in x])
    width, branches = mixer.head_dim, 1 if mixer.name == "softmax" else 2

    def rotated(heads: np.ndarray) -> np.ndarray:
        out = np.empty_like(heads)  # [T, H, d]
        for position in range(len(heads)):
            for pair in range(width // 2):
                angle = position * config.rope_theta ** (-2 * pair / width)
                low, high = heads[position, :, pair], heads[position, :, pair + width // 2]
                out[position, :, pair] = low * math.cos(angle) - high * math.sin(angle)
                out[position, :, pair + width // 2] = high * math.cos(angle) + low * math.sin(angle)
        return out

    query = rotated((x @ weight["self_attn.q_proj.weight"].T).reshape(len(ids), -1, width))
    key = rotated((x @ weight["self_attn.k_proj.weight"].T).reshape(len(ids), -1, width))
    weights = np.zeros((mixer.num_heads, branches, len(ids), len(ids)))
    used = np.zeros((mixer.num_heads, len(ids), len(ids)))
    for head in range(mixer.num_heads):
        group = head // (mixer.num_heads // mixer.num_kv_heads)
        for q in range(len(ids)):
            for branch in range(branches):
                key_head = 2 * group + branch if mixer.name == "diff_v1" else group
                logits = [
                    query[q, branches * head + branch] @ key[k, key_head] / math.sqrt(width) for k in range(q + 1)
                ]
                powers = [math.exp(logit - max(logits)) for logit in logits]
                weights[head, branch, q, : q + 1] = [power / sum(powers) for power in powers]
            used[head, q] = weights[head, 0, q] - (lambda_(weight, x[q], layer, head) * weights[head, -1, q])
    return weights, used


def lambda_(weight: dict[str, np.ndarray], x: np.ndarray, layer: int, head: int) -> float:
    """Of version 1, of version 2; 0 in a plain layer."""
    part = {name.removeprefix("self_attn."): value for name, value in weight.items()}
    if "lambda_q1" in part:
        first, second = (math.exp(part[f"lambda_q{i}"] @ part[f"lambda_k{i}"]) for i in (1, 2))
        return first - second + 0.8 - 0.6 * math.exp(-0.3 * layer)
    if "lambda_proj.weight" in part:
        return float(1 / (1 + math.exp(-(part["lambda_proj.weight"][head] @ x))))
    return 0.0


@pytest.fixture(params=["diff_v1", "diff_v2", "softmax", "grouped queries"])
def folder(request: pytest.FixtureRequest, trained: Callable[[str], Path]) -> Path:
    grouped = request.param == "grouped queries"  # diff_v1 with two heads per kv head
    return request.getfixturevalue("checkpoint") if grouped else trained(request.param)


def test_maps_and_page_equal_the_slow_attention(folder: Path) -> None:
    decoder, ids = load(folder), load_tokenizer(folder).backend.encode(PROMPT).ids
    whole = run(decoder, ids)
    with torch.inference_mode():
        assert torch.allclose(whole.next_logits, decoder(torch.tensor([ids]))[0, -1], atol=1e-4)
    (model,) = document([folder], PROMPT, None, "cpu")["models"]
    shown = maps_of(model, model["settings"][0])
    assert [layer["layer"] for layer in model["layers"]] == list(whole.maps) == [0, 1]
    for layer, maps in whole.maps.items():
        weights, used = slow(decoder, whole, ids, layer)
        assert np.abs(maps.weights.numpy() - weights).max() < EXACT
        assert np.abs(maps.used.numpy() - used).max() < EXACT
        decoded, lambdas = shown[layer]
        assert (np.abs(decoded - weights) <= np.sqrt(weights) / 255 + EXACT).all()
        for head, numbers in enumerate(model["settings"][0]["heads"][layer]):
            rows = [*weights[head, :, -1], used[head, -1]] if lambdas is not None else [used[head, -1]]
            first = [abs(row[0]) / np.abs(row).sum() for row in rows]
            assert numbers["first"] == pytest.approx(first, abs=EXACT)
            below = -np.minimum(rows[-1], 0).sum() / np.abs(rows[-1]).sum()
            assert numbers["negative"] == pytest.approx(below, abs=EXACT)
            if lambdas is None:
                assert numbers["lambda"] is None
            else:
                assert numbers["lambda"] == pytest.approx(lambdas[head, -1], abs=EXACT)
                difference = weights[head, 0] - lambdas[head][:, None] * weights[head, 1]
                assert np.abs(difference - used[head]).max() < EXACT


def test_low_bit_logits_are_rounded_before_the_softmax(trained: Callable[[str], Path]) -> None:
    decoder = load(trained("diff_v2"))
    ids = list(range(3, 20))
    whole = run(decoder, ids)
    maps = run(apply(decoder, Scheme(attention=AttentionScheme(logits=3))), ids).maps[0]
    exact = whole.maps[0].logits.double().numpy()
    assert np.abs(maps.logits.double().numpy() - exact).max() < EXACT
    row = exact[5, 9, :10]  # softmax 5: the noise of head 2
    scale = np.abs(row).max() / 3
    powers = np.exp(np.round(row / scale) * scale)
    assert maps.weights[2, 1, 9, :10].numpy() == pytest.approx(powers / powers.sum(), abs=EXACT)


def test_settings_are_those_of_the_library(
    trained: Callable[[str], Path],
) -> None:
    """The next token's probabilities of a setting are those of the model that `apply` makes."""
    float_, int8 = load(trained("diff_v1")), parse_format("int8")
    (model,) = document([trained("diff_v1")], PROMPT, None, "cpu")["models"]
    ids = load_tokenizer(trained("diff_v1")).backend.encode(PROMPT).ids
    schemes = {
        ("weights", 4): Scheme(weights=parse_format("int4_g32"), embedding=int8, head=int8),
        ("kv", 8): Scheme(attention=AttentionScheme(keys="int8", values="int8")),
        ("kv", 2): Scheme(attention=AttentionScheme(keys="int2", values="int2", window=0, first=0)),
        ("logits", 2): Scheme(attention=AttentionScheme(logits=2)),
    }
    settings = {(one["what"], one["bits"]): one for one in model["settings"]}
    assert next(iter(settings)) == ("nothing", 0) and len(settings) == 10
    assert len(ids) >= 32 and settings["kv", 2]["kl"] > 0  # the first 32 tokens are rounded
    with torch.inference_mode():
        before = float_(torch.tensor([ids]))[0, -1].double().softmax(-1).numpy()
        for key, scheme in schemes.items():
            after = apply(float_, scheme)(torch.tensor([ids]))[0, -1].double().softmax(-1).numpy()
            kl = (before * np.log(before / after)).sum()
            assert settings[key]["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
            best = np.argsort(-after)[:5]
            shown = settings[key]["next"]
            assert [one["probability"] for one in shown] == pytest.approx(after[best].tolist(), rel=1e-3)
            assert [one["before"] for one in shown] == pytest.approx(before[best].tolist(), rel=1e-3)


def test_hooks_are_taken_away_and_others_kept() -> None:
    config = ModelConfig.uniform(
        vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16,
        attention="diff_v1",
    )  # fmt: skip
    decoder = Decoder(config)
    calls = []

    def zero(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return x * 0

    decoder.model.layers[0].self_attn.logits_hook = zero
    maps = run(decoder, [1, 2, 3, 4]).maps[0]
    assert maps.logits.abs().max() > 0 and torch.allclose(maps.weights[0, 0, -1], torch.full((4,), 0.25))
    assert decoder.model.layers[0].self_attn.logits_hook is zero and len(calls) == 1
    assert decoder.model.layers[1].self_attn.logits_hook is None
    for layer in decoder.model.layers:
        assert not (layer._forward_hooks or layer.self_attn._forward_pre_hooks)
