"""Needles counted on tiny models, against one query at a time; rows are made so that the float model answers most."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.evaluate import plots
from diffbit.apps.evaluate.compare import compare
from diffbit.apps.evaluate.measure import EXPLICIT_BYTES, Setup, _batch_sizes
from diffbit.apps.evaluate.retrieval import answered, parse_setting, retrieval
from diffbit.apps.evaluate.variants import Variant, unchanged
from diffbit.calib_data import VALUE, NeedleWindows, Windows, windows
from diffbit.io.drawing import panels
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, load, save
from diffbit.quantize import AttentionScheme, Scheme, apply

from . import made_up

VOCABULARY, LENGTH, ROWS = 97, 96, 12


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = []
    for seed, attention in enumerate(("diff_v1", "softmax", "diff_v2")):
        torch.manual_seed(seed)
        heads = {"diff_v1": 1, "softmax": 2, "diff_v2": 2}[attention]
        config = ModelConfig.uniform(
            vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=heads, num_kv_heads=1, head_dim=32,
            intermediate_size=64, max_position=LENGTH, attention=attention, tie_embeddings=True,
        )  # fmt: skip
        decoder = Decoder(config)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6)
        path = tmp_path_factory.mktemp("models") / attention
        save(decoder, path)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def text() -> Windows:
    return windows([np.random.default_rng(0).integers(1, VOCABULARY, 400)], LENGTH, eos_id=0, source="made up")


def asked(path: Path, queries: int = 3) -> NeedleWindows:
    """Rows whose answers are what the float model says, but for the first token of one in four."""
    generator = np.random.default_rng(1)
    ids = generator.integers(1, VOCABULARY, (ROWS, LENGTH))
    starts = np.tile(LENGTH - 5 * np.arange(queries, 0, -1), (ROWS, 1))
    decoder = load(path)
    for query in range(queries):
        for place in range(starts[0, query], starts[0, query] + VALUE):
            with torch.inference_mode():
                ids[:, place] = decoder(torch.from_numpy(ids[:, :place]))[:, -1].argmax(-1).numpy()
            if place == starts[0, query]:
                wrong = generator.random(ROWS) < 0.25
                ids[wrong, place] = 1 + ids[wrong, place] % (VOCABULARY - 1)
    mask = np.ones(ids.shape, dtype=bool)
    target = np.zeros(ids.shape, dtype=bool)
    for place in range(VALUE):
        np.put_along_axis(target, starts + place, True, axis=1)
    cut = Windows(ids, mask, target, "ab" * 32, "made up", ids.size, 0, 1)
    return NeedleWindows(cut, starts, generator.random(starts.shape), 5)


def slowly(decoder: Decoder, needles: NeedleWindows) -> np.ndarray:
    """One query at a time, from its beginning."""
    answers = np.zeros(needles.starts.shape, dtype=bool)
    for row, query in np.ndindex(*answers.shape):
        ids, start = needles.windows.ids[row], needles.starts[row, query]
        with torch.inference_mode():
            likeliest = [int(decoder(torch.from_numpy(ids[None, : start + k]))[0, -1].argmax()) for k in range(VALUE)]
        answers[row, query] = likeliest == ids[start : start + VALUE].tolist()
    return answers


@pytest.mark.parametrize("index", [0, 1, 2])
def test_answers_one_query_at_a_time(checkpoints: list[Path], index: int) -> None:
    needles = asked(checkpoints[index])
    decoder = load(checkpoints[index])
    whole = answered(decoder, needles, 5)
    assert (whole == slowly(decoder, needles)).all()
    assert 0.5 < whole.mean() < 0.95
    low = apply(decoder, Scheme(attention=AttentionScheme(keys="int2", values="int2", window=0)), "rtn")
    answers = answered(low, needles, ROWS)
    assert (answers == slowly(low, needles)).all()
    assert (answers != whole).any()


def test_a_setting_by_hand(checkpoints: list[Path]) -> None:
    needles = replace(asked(checkpoints[0], 2), depths=np.tile([0.1, 1.0], (ROWS, 1)))
    reference = np.ones((ROWS, 2), dtype=bool)
    answers = reference.copy()
    answers[:3, 1] = False
    told = retrieval(needles, answers, reference)
    assert (told.length, told.needles, told.queries) == (LENGTH, 5, 2)
    assert told.accuracy.value == pytest.approx(21 / 24) and told.change.value == pytest.approx(-3 / 24)
    lost = np.array([0.5] * 3 + [0.0] * 9)
    half = 2.20099 * lost.std(ddof=1) / math.sqrt(ROWS)  # t of 11 degrees of freedom, the skewness taken out
    assert told.change.high - told.change.value < half < told.change.value - told.change.low < 2 * half
    assert told.by_depth == (1.0, None, None, None, 0.75)
    assert told.accuracy.high - 1 == pytest.approx(told.change.high)
    same = retrieval(needles, answers, answers).change
    assert (same.value, same.low, same.high) == (0, 0, 0)


@pytest.mark.slow
def test_compare_with_needles(checkpoints: list[Path], text: Windows, tmp_path: Path) -> None:
    needles = [asked(checkpoints[0]), asked(checkpoints[1], 2)]
    result = compare(checkpoints, text, ["16", "8", "4", "2"], ["kv", "qk"], needles=needles, batch_size=5)
    assert [(r.what, r.format) for r in result.results[:6]] == [
        ("none", "16"), ("qk", "int8"), ("qk", "int4"), ("kv", "int8"), ("kv", "int4"), ("kv", "int2"),
    ]  # fmt: skip
    for path in checkpoints:
        results = {(r.what, r.format): r for r in result.results if r.model == path.name}
        decoder = load(path)
        whole = [answered(decoder, one, ROWS) for one in needles]
        for (what, format), schemes in {
            ("none", "16"): AttentionScheme(),
            ("qk", "int4"): AttentionScheme(qk="int4"),
            ("kv", "int2"): AttentionScheme(keys="int2", values="int2"),
        }.items():
            model = apply(decoder, Scheme(attention=schemes), "rtn")
            for one, told, reference in zip(needles, results[what, format].retrieval, whole, strict=True):
                answers = answered(model, one, ROWS)
                assert told.accuracy.value == pytest.approx(answers.mean())
                assert told.change.value == pytest.approx(answers.mean() - reference.mean())
        assert results["kv", "int8"].kl.value < results["kv", "int4"].kl.value < results["kv", "int2"].kl.value
        assert results["kv", "int2"].cache_bytes < results["qk", "int4"].cache_bytes < results["none", "16"].cache_bytes
    changes = {(r.model, r.what, r.format): [one.change.value for one in r.retrieval] for r in result.results}
    for contrast in result.contrasts:
        ours, theirs = (changes[name, contrast.what, contrast.format] for name in (contrast.model, contrast.against))
        expected = [a - b for a, b in zip(ours, theirs, strict=True)]
        assert [estimate.value for estimate in contrast.retrieval] == pytest.approx(expected)
    assert result.needles[1]["queries"] == 2 and result.needles[0]["rows"] == ROWS

    row = result.rows()[3]
    assert row["KV bytes/token"] == 2 * 2 * 2 * (32 + 4) and "bits/weight" not in row
    assert row[f"found, 5:3 of {LENGTH}"].count("%") == 1
    result.write_csv(tmp_path / "c.csv")
    with open(tmp_path / "c.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert float(table[5][f"retrieval_5_3_{LENGTH}_change_low"]) == result.results[5].retrieval[0].change.low


def test_explicit_attention_takes_as_many_windows_as_fit() -> None:
    config = ModelConfig.uniform(
        vocab_size=VOCABULARY, hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32,
        intermediate_size=64, max_position=4096, attention="diff_v2",
    )  # fmt: skip
    low = Variant("kv", "int4", "none", 4, Scheme(attention=AttentionScheme(keys="int4")))

    def sizes(variant: Variant, length: int) -> list[int]:
        return _batch_sizes(variant, config, Setup(windows([np.ones(9000, np.int64)], length, eos_id=0)))

    assert sizes(unchanged(None), 4096) == [8]
    assert [sizes(low, length) for length in (64, 1024, 4096)] == [[8], [4], [1]]
    assert 4 * 8 * 4 * 16 * 1024**2 <= EXPLICIT_BYTES < 5 * 8 * 4 * 16 * 1024**2  # 16 sub-heads, 8 copies in fp32


def test_bad_input_is_refused(checkpoints: list[Path], text: Windows) -> None:
    assert parse_setting("6:2", 512) == (6, 2, 512) and parse_setting(" 1:1:256", 512) == (1, 1, 256)
    for entry in ("6", "6:2:1:1", "6:b", "", "6:-2"):
        with pytest.raises(DiffbitError, match="wanted NEEDLES:QUERIES"):
            parse_setting(entry, 512)
    needles = asked(checkpoints[0])
    one = replace(needles, starts=needles.starts[:1], depths=needles.depths[:1])
    with pytest.raises(DiffbitError, match="two rows or more"):
        compare(checkpoints[:1], text, ["8"], ["kv"], needles=[one])
    long = replace(needles, windows=replace(needles.windows, ids=np.ones((2, LENGTH + 1), dtype=np.int64)))
    with pytest.raises(DiffbitError, match=f"context of {LENGTH}"):
        compare(checkpoints[:1], text, ["8"], ["kv"], needles=[long])


def test_the_plot_shows_points_to_the_16_bit_model(tmp_path: Path) -> None:
    data = made_up.comparison(needles=(128, 1024))
    charts = plots.charts(data, "kv")
    assert [chart.unit for chart in charts] == ["%", " nats", " points", " points"]
    assert charts[3].title == "KV cache: 2 of 6 needles"
    with panels() as (_, axes):
        charts[3].draw(axes[0])
        lines = {line.get_label(): list(line.get_ydata()) for line in axes[0].lines}
        ticks = [tick.get_text() for tick in axes[0].get_xticklabels()]
        band = axes[0].collections[0].get_paths()[0].vertices
        bottom, top = axes[0].get_ylim()
        assert axes[0].get_ylabel() == "points to 16 bits, of 1,024 tokens"
    assert ticks == ["int8", "int4", "int2"]
    rows = [r for r in data["results"] if r["model"] == "diff" and r["what"] == "kv"]
    assert lines["diff, 90.0% at 16 bits"] == [100 * r["retrieval"][1]["change"]["value"] for r in rows]
    assert {round(float(y), 6) for x, y in band if x == 2} == {
        round(100 * rows[2]["retrieval"][1]["change"][end], 6) for end in ("low", "high")
    }
    assert bottom < min(lines["plain, 90.0% at 16 bits"]) and top > 0
    plots.plot_comparison(data, tmp_path / "c.svg")
    assert "KV cache: increase of perplexity" in (tmp_path / "c.svg").read_text()
