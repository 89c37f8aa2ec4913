"""Outlier statistics against numpy on all numbers at once, and on activations caught by code of the test's own."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from diffbit.apps.evaluate.outliers import MEDIAN_ERROR, RANKS, OutlierReport, Place, Statistics, measure, rows
from diffbit.calib_data import Windows
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, rope_for
from diffbit.models.mixers import mamba


def place(offset: int = 0):
    return lambda index: Place(0, offset + index, 0)


def statistics(values: np.ndarray, offset: int = 0) -> Statistics:
    result = Statistics()
    result.update(torch.from_numpy(values.astype(np.float32)), place(offset))
    return result


def expected(values: np.ndarray) -> dict[str, float]:
    """numpy on everything at once, in float64."""
    values = values.astype(np.float64)
    deviation = values - values.mean()
    return {
        "median": float(np.median(np.abs(values))),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "kurtosis": float((deviation**4).mean() / (deviation**2).mean() ** 2),
    }


def check(summary, values: np.ndarray) -> None:
    wanted = expected(values)
    largest = np.sort(np.abs(values))[::-1]
    assert summary.count == values.size
    for rank, found in zip(RANKS, summary.top.values(), strict=True):
        assert found == (largest[rank - 1] if rank <= values.size else None)
    assert summary.median == pytest.approx(wanted["median"], rel=MEDIAN_ERROR * 1.001)
    assert summary.mean == pytest.approx(wanted["mean"], rel=1e-9, abs=1e-12)
    assert summary.std == pytest.approx(wanted["std"], rel=1e-9)
    assert summary.kurtosis == pytest.approx(wanted["kurtosis"], rel=1e-9)


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heavy = rng.standard_t(2, 5001)
    return {
        "normal": rng.normal(size=4000),
        "heavy tails": heavy,
        "far from zero": rng.normal(1000, 0.1, 3001),
        "tiny and huge": np.exp(rng.uniform(-60, 60, 2000)) * rng.choice([-1, 1], 2000),
        "few": rng.normal(size=7),
        "even count with a gap in the middle": np.array([1.0, 2.0, 200.0, 300.0]),
        "many equal": rng.integers(-3, 4, 1000).astype(float),
    }


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("parts", [1, 3, 50])
def test_streaming_in_parts_equals_numpy_on_everything(name: str, parts: int) -> None:
    values = samples()[name].astype(np.float32)
    total = Statistics()
    for part in np.array_split(np.arange(values.size), parts):
        if part.size:
            total.update(torch.from_numpy(values[part]), place(int(part[0])))
    check(total.summary(), values)
    assert total.summary().place.position == int(np.argmax(np.abs(values)))  # the first of equals


def merged(*parts: Statistics) -> Statistics:
    result = Statistics()
    for part in parts:
        result.merge(part)
    return result


def test_merging_is_associative_and_commutative() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.standard_t(3, size).astype(np.float32) for size in (1, 250, 3000, 17)]
    a, b, c, d = (statistics(part, 10_000 * index) for index, part in enumerate(parts))
    trees = [
        merged(a, b, c, d),
        merged(a, merged(b, merged(c, d))),
        merged(merged(d, b), merged(a, c)),
        merged(Statistics(), c, Statistics(), merged(d, merged(b, a))),
    ]
    for tree in trees:
        check(tree.summary(), np.concatenate(parts))
        assert torch.equal(tree.top, trees[0].top)
        assert torch.equal(tree.histogram, trees[0].histogram)
        assert tree.place == trees[0].place


def test_a_shorter_list_than_the_ranks_need_would_be_noticed() -> None:
    """The 100 largest all lie in one part of many: a top-k that keeps fewer per part loses them."""
    values = np.concatenate([np.arange(1, 2000) / 1e4, np.arange(1000, 1100)]).astype(np.float32)
    total = Statistics()
    for start in range(0, values.size, 700):
        total.update(torch.from_numpy(values[start : start + 700]), place(start))
    assert list(total.summary().top.values()) == [1099.0, 1098.0, 1097.0, 1090.0, 1000.0]


@pytest.mark.parametrize("scale", [1e-35, 1e-3, 1.0, 1e30])
def test_median_keeps_its_stated_precision_at_every_magnitude(scale: float) -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        values = (rng.lognormal(0, 3, rng.integers(1, 9)) * scale).astype(np.float32)
        truth = float(np.median(values.astype(np.float64)))
        assert statistics(values).median() == pytest.approx(truth, rel=MEDIAN_ERROR * 1.001)
    assert MEDIAN_ERROR < 1e-3
    assert statistics(np.zeros(5)).median() == 0.0
    assert statistics(np.zeros(5)).summary().ratio is None


def test_known_kurtosis() -> None:
    assert statistics(np.tile([-1.0, 1.0], 500)).summary().kurtosis == pytest.approx(1.0)
    assert statistics(np.ones(10)).summary().kurtosis is None
    outlier = np.zeros(10_000)
    outlier[77] = 5.0
    assert statistics(outlier).summary().kurtosis == pytest.approx(9998, rel=1e-3)


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


def close(summary, values: np.ndarray) -> None:
    wanted = expected(values)
    largest = np.sort(np.abs(values))[::-1]
    assert summary.count == values.size
    np.testing.assert_allclose(list(summary.top.values()), largest[[rank - 1 for rank in RANKS]], rtol=1e-4)
    assert summary.median == pytest.approx(wanted["median"], rel=2e-3)
    assert summary.std == pytest.approx(wanted["std"], rel=1e-4)
    assert summary.kurtosis == pytest.approx(wanted["kurtosis"], rel=1e-3)


def test_layers_without_attention_have_hidden_states_alone() -> None:
    config = model("diff_v1").config
    memory = replace(config.layers[0], mixer=mamba.Options(inner_size=16, state_size=4, conv_width=4, dt_rank=2))
    decoder = Decoder(replace(config, layers=(memory, *config.layers[1:])))
    report = measure(decoder, text(), name="m")
    assert [found.layer for found in report.attention_logits.layers] == [1, 2]
    assert [row["logits_max"] is None for row in report.layer_rows()] == [True, False, False]
    assert [row["layer"] for row in report.layer_rows()] == [0, 1, 2]
    with pytest.raises(DiffbitError, match="m: no layer has attention, so there are no attention logits to measure"):
        measure(Decoder(replace(config, layers=(memory, memory))), text(), name="m")


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_a_model_is_measured_where_tokens_are_and_nowhere_else(attention: str) -> None:
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
def test_the_place_of_the_largest(attention: str) -> None:
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
    found = seen[0][0, summary.place.unit, summary.place.position, summary.place.key]
    assert abs(found.item()) == pytest.approx(summary.max, rel=1e-5)
    assert windows.mask[window, summary.place.position]


def test_batch_size_changes_nothing_and_hooks_are_put_back() -> None:
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


def test_report_as_rows_and_json() -> None:
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


def test_nan_and_nothing_are_refused() -> None:
    with pytest.raises(DiffbitError, match="no token"):
        Statistics().summary()
    decoder = model("softmax")
    with torch.no_grad():
        decoder.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(DiffbitError, match=r"broken: hidden states of layer 1: .*NaN"):
        measure(decoder, text(), name="broken")
    assert decoder.model.layers[1].self_attn.logits_hook is None
