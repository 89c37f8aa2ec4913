"""Activations against those that the test catches by itself, one window at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.outliers.activations import OutlierReport, measure, rows
from diffbit.apps.outliers.statistics import RANKS, Summary
from diffbit.calib_data import Windows
from diffbit.io.drawing import SITES, outliers_chart, write_charts
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, rope_for
from diffbit.models.mixers import mamba

from .test_statistics import expected


def model(attention: str, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    config = ModelConfig.uniform(
        vocab_size=50, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        max_position=32, attention=attention,
    )  # fmt: skip
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return decoder


def text(windows: int = 5, length: int = 12) -> Windows:
    rng = np.random.default_rng(3)
    mask = np.ones((windows, length), dtype=bool)
    mask[-1, 7:] = False
    mask[1, :2] = False  # padding on the left, too
    ids = rng.integers(0, 50, (windows, length))
    return Windows(ids, mask, mask, sha256="", source="made up", tokens=int(mask.sum()), unused=0, documents=1)


def caught(decoder: Decoder, windows: Windows) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every window on its own, without padding; all logits and hidden states per layer, kept in memory."""
    logits: list[list[np.ndarray]] = [[] for _ in decoder.model.layers]
    hidden: list[list[np.ndarray]] = [[] for _ in decoder.model.layers]
    for index, layer in enumerate(decoder.model.layers):

        def keep(x: torch.Tensor, valid: torch.Tensor, index: int = index) -> torch.Tensor:
            for query in range(x.shape[2]):
                logits[index].append(x[0, :, query, : query + 1].flatten().double().numpy())
            return x

        layer.self_attn.logits_hook = keep
    with torch.inference_mode():
        for ids, mask in zip(windows.ids, windows.mask, strict=True):
            x = decoder.embed(torch.from_numpy(ids[mask])[None])
            rope = rope_for(decoder.config, torch.arange(int(mask.sum()))[None])
            for index, layer in enumerate(decoder.model.layers):
                x = layer(x, rope)
                hidden[index].append(x.flatten().double().numpy())
    for layer in decoder.model.layers:
        layer.self_attn.logits_hook = None
    return [np.concatenate(part) for part in logits], [np.concatenate(part) for part in hidden]


def close(summary: Summary, values: np.ndarray) -> None:
    exact = expected(values)
    largest = np.sort(np.abs(values))[::-1]
    assert summary.count == values.size
    np.testing.assert_allclose(list(summary.top.values()), largest[[rank - 1 for rank in RANKS]], rtol=1e-4)
    assert summary.median == pytest.approx(exact["median"], rel=2e-3)
    assert summary.std == pytest.approx(exact["std"], rel=1e-4)
    assert summary.kurtosis == pytest.approx(exact["kurtosis"], rel=1e-3)


def test_layer_without_attention_has_no_logits(tmp_path: Path) -> None:
    config = model("diff_v1").config
    memory = replace(config.layers[0], mixer=mamba.Options(inner_size=16, state_size=4, conv_width=4, dt_rank=2))
    decoder = Decoder(replace(config, layers=(memory, *config.layers[1:])))
    report = measure(decoder, text(), name="m")
    assert [summary.layer for summary in report.attention_logits.layers] == [1, 2]
    assert [row["logits_max"] is None for row in report.layer_rows()] == [True, False, False]
    assert [row["layer"] for row in report.layer_rows()] == [0, 1, 2]
    alone = measure(Decoder(replace(config, layers=(memory, memory))), text(), name="m")
    assert alone.attention_logits is None and len(alone.hidden_states.layers) == 2
    assert [row["activations"] for row in rows([report, alone])] == ["attention logits", *2 * ["hidden states"]]
    assert [row["logits_max"] for row in alone.layer_rows()] == [None, None]
    for name, reports in (("both", [report, alone]), ("alone", [alone])):
        charts = [outliers_chart([one.to_dict() for one in reports], site) for site in SITES]
        write_charts(tmp_path / f"{name}.svg", charts)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_only_tokens_are_measured(attention: str) -> None:
    decoder, windows = model(attention), text()
    report = measure(decoder, windows, batch_size=2, name="m")
    logits, hidden = caught(decoder, windows)
    for index in range(3):
        close(report.attention_logits.layers[index], logits[index])
        close(report.hidden_states.layers[index], hidden[index])
    close(report.attention_logits, np.concatenate(logits))
    close(report.hidden_states, np.concatenate(hidden))
    assert report.tokens == windows.mask.sum() and report.windows == 5
    heads = 4 if attention == "softmax" else 8
    lengths = windows.mask.sum(1)
    assert report.attention_logits.count == 3 * heads * (lengths * (lengths + 1) // 2).sum()


@pytest.mark.parametrize("attention", ["softmax", "diff_v1"])
def test_place_of_the_largest(attention: str) -> None:
    """A planted outlier in one channel is found there; the largest logit is where the place says it is."""
    decoder, windows = model(attention), text()
    with torch.no_grad():
        decoder.model.layers[1].mlp.down_proj.weight[13] *= 400
    report = measure(decoder, windows, batch_size=3)
    assert report.hidden_states.layers[1].place.unit == report.hidden_states.place.unit == 13
    assert report.hidden_states.layers[0].max < report.hidden_states.layers[1].max / 10
    assert report.hidden_states.layer in (1, 2)

    summary = report.attention_logits.layers[2]
    seen = []

    def look(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    decoder.model.layers[2].self_attn.logits_hook = look
    window = summary.place.window
    mask = torch.from_numpy(windows.mask[[window]]).long()
    with torch.inference_mode():
        decoder(torch.from_numpy(windows.ids[[window]]), attention_mask=mask)
    value = seen[0][0, summary.place.unit, summary.place.position, summary.place.key]
    assert abs(value.item()) == pytest.approx(summary.max, rel=1e-5)
    assert windows.mask[window, summary.place.position]


def test_hooks_are_restored_and_batch_size_changes_nothing() -> None:
    decoder, windows = model("diff_v1"), text()
    calls = []

    def low_bit(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return x * 0

    decoder.model.layers[0].self_attn.logits_hook = low_bit
    one, all_ = (measure(decoder, windows, batch_size=size) for size in (1, 5))
    assert one.attention_logits.top == pytest.approx(all_.attention_logits.top, rel=1e-4)
    assert one.hidden_states.median == pytest.approx(all_.hidden_states.median, rel=3e-3)
    assert one.hidden_states.place == all_.hidden_states.place
    assert len(calls) == 6  # a hook that was there still runs
    assert one.attention_logits.layers[0].max > 0  # and is given what it was given before
    assert decoder.model.layers[0].self_attn.logits_hook is low_bit
    assert decoder.model.layers[1].self_attn.logits_hook is None
    assert not decoder.model.layers[1]._forward_hooks


def test_rows_and_json() -> None:
    windows = text()
    reports = [measure(model(name), windows, name=name) for name in ("softmax", "diff_v1")]
    table = rows(reports)
    assert [(row["activations"], row["model"]) for row in table] == [
        ("attention logits", "softmax"), ("attention logits", "diff_v1"),
        ("hidden states", "softmax"), ("hidden states", "diff_v1"),
    ]  # fmt: skip
    assert list(table[0])[2:8] == ["top-1", "top-2", "top-3", "top-10", "top-100", "median"]
    assert table[3]["top-1"] == reports[1].hidden_states.max
    stored = json.loads(json.dumps(reports[1].to_dict(), allow_nan=False))
    assert stored["hidden_states"]["top"]["1"] == reports[1].hidden_states.max
    assert len(stored["attention_logits"]["layers"]) == 3
    assert stored["hidden_states"]["place"]["unit"] == reports[1].hidden_states.place.unit
    assert [row["layer"] for row in reports[0].layer_rows()] == [0, 1, 2]
    assert isinstance(reports[0], OutlierReport)


def test_nan_is_refused() -> None:
    decoder = model("softmax")
    with torch.no_grad():
        decoder.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(DiffbitError, match=r"broken: hidden states of layer 1: .*NaN"):
        measure(decoder, text(), name="broken")
    assert decoder.model.layers[1].self_attn.logits_hook is None
