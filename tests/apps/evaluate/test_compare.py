"""compare() on tiny models, against a slow comparison written out here: one window at a time, everything kept."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.evaluate import measure
from diffbit.apps.evaluate.compare import compare
from diffbit.apps.evaluate.metrics import Scores, mean, recovered
from diffbit.apps.evaluate.plots import plot_comparison
from diffbit.calib_data import Windows, eval_windows, samples, windows
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig, load, save
from diffbit.quantize import Scheme, apply, as_exported, quantize_checkpoint, read_weight
from diffbit.quantize.methods.rtn import quantize as rtn
from diffbit.runtime import Artifact

VOCABULARY = 97


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = []
    for seed, attention in enumerate(("diff_v1", "softmax")):
        torch.manual_seed(seed)
        heads = 2 if attention == "diff_v1" else 4
        config = ModelConfig.uniform(
            vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=heads, num_kv_heads=heads // 2, head_dim=16,
            intermediate_size=96, max_position=32, attention=attention, tie_embeddings=True,
        )  # fmt: skip
        decoder = Decoder(config)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4)
        path = tmp_path_factory.mktemp("models") / attention
        save(decoder, path)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def text() -> Windows:
    rng = np.random.default_rng(0)
    return windows([rng.integers(1, VOCABULARY, 150)], 16, eos_id=0, overlap=3, source="made up")


def slow_losses(decoder: Callable[[torch.Tensor], torch.Tensor], text: Windows) -> tuple[list[np.ndarray], np.ndarray]:
    """Per window: probabilities [n, V] at the scored tokens (float64); and the negative log likelihood [W]."""
    probabilities, losses = [], []
    for ids, target, mask in zip(text.ids, text.target, text.mask, strict=True):
        with torch.inference_mode():
            logits = decoder(torch.from_numpy(ids[mask])[None])[0].double().numpy()
        at = [t for t in range(1, mask.sum()) if target[t]]
        soft = np.exp(logits[[t - 1 for t in at]])
        soft /= soft.sum(-1, keepdims=True)
        probabilities.append(soft)
        losses.append(-sum(math.log(row[ids[t]]) for row, t in zip(soft, at, strict=True)))
    return probabilities, np.array(losses)


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """x rounded to int8 with one scale for each `block` neighbours, as Int4MatMul, Int8MatMul and MatMulNBits do."""
    parts = x.split(block, -1)  # in float32, for an int8 table gives many numbers half-way between two codes
    largest = [part.abs().amax(-1, keepdim=True) for part in parts]
    codes = [(part * (torch.tensor(127.0) / most)).round() for part, most in zip(parts, largest, strict=True)]
    return torch.cat([code * (most / 127) for code, most in zip(codes, largest, strict=True)], -1)


def by_hand(path: Path, format: str, arithmetic: str) -> Decoder:
    """The model with its tied table and its linear layers rounded, one after the other, without any scheme."""
    decoder = load(path)
    if arithmetic == "artifact":
        block = parse_format(format).group_size
        for name, module in decoder.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, inputs: in_blocks(inputs[0], block))
        decoder.model.norm.register_forward_hook(lambda _, inputs, output: in_blocks(output, 32))  # before the head
    table = decoder.model.embed_tokens.weight
    table.data = rtn(table.data, parse_format("int8")).dequantize()
    for name, module in decoder.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert name.endswith("_proj")
            module.weight.data = rtn(module.weight.data, parse_format(format)).dequantize()
    return decoder


@pytest.mark.parametrize("arithmetic", ["artifact", "float"])
def test_against_a_slow_comparison(checkpoints: list[Path], text: Windows, arithmetic: str) -> None:
    result = compare(checkpoints, text, ["16", "4", "int3_g32"], ["weights"], batch_size=3, arithmetic=arithmetic)
    assert result.arithmetic == arithmetic
    assert [(r.model, r.what, r.format) for r in result.results] == [
        (model, what, format)
        for model in ("diff_v1", "softmax")
        for what, format in (("none", "16"), ("weights", "int4_g64"), ("weights", "int3_g32"))
    ]
    tokens = text.target[:, 1:].sum(1)
    changes = {}
    for path in checkpoints:
        p, reference = slow_losses(load(path), text)
        for row in [r for r in result.results if r.model == path.name]:
            decoder = load(path) if row.format == "16" else by_hand(path, row.format, arithmetic)
            q, losses = slow_losses(decoder, text)
            kl = sum(float((a * np.log(a / b)).sum()) for a, b in zip(p, q, strict=True)) / tokens.sum()
            same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(p, q, strict=True)) / tokens.sum()
            assert row.perplexity.value == pytest.approx(math.exp(losses.sum() / tokens.sum()), rel=1e-4)
            assert row.ratio.value == pytest.approx(math.exp((losses - reference).sum() / tokens.sum()), rel=1e-4)
            assert row.kl.value == pytest.approx(kl, rel=1e-3, abs=1e-9)
            assert row.agreement.value == pytest.approx(same)
            changes[path.name, row.format] = (losses - reference).sum() / tokens.sum()
            if row.format == "16":
                assert row.ratio.low == row.ratio.high == 1.0
            else:  # paired: the spread of the differences, not of the losses
                high = mean(losses - reference, tokens).high
                assert math.log(row.ratio.high) == pytest.approx(high, rel=1e-3)
    assert len(result.contrasts) == 2
    for contrast in result.contrasts:
        assert (contrast.model, contrast.against) == ("softmax", "diff_v1")
        expected = changes["softmax", contrast.format] - changes["diff_v1", contrast.format]
        assert contrast.difference.value == pytest.approx(expected, rel=1e-2, abs=1e-5)
        assert contrast.difference.low < contrast.difference.value < contrast.difference.high


def calibration_text() -> Windows:
    return windows([np.random.default_rng(1).integers(1, VOCABULARY, 400)], 16, eos_id=0, source="other")


@pytest.mark.slow
def test_methods(checkpoints: list[Path], text: Windows) -> None:
    other = calibration_text()
    result = compare(checkpoints, text, ["3", "8"], ["weights", "logits"], ["rtn", "gptq"], calibration=other)
    assert [(r.format, r.method) for r in result.results if r.model == "softmax"] == [
        ("16", "none"), ("int3_g64", "rtn"), ("int3_g64", "gptq"), ("int8", "rtn"), ("int8", "gptq"),
        ("3-bit", "none"), ("8-bit", "none"),
    ]  # fmt: skip
    assert len(result.contrasts) == 6 and {c.method for c in result.contrasts} == {"rtn", "gptq", "none"}
    assert result.calibration == {
        "source": "other", "sha256": other.sha256, "windows": 26, "length": 16, "tokens": int(other.mask.sum()),
        "samples": 1,
    }  # fmt: skip
    by_method = {r.method: r for r in result.results if (r.model, r.format) == ("diff_v1", "int3_g64")}
    decoder, scheme = load(checkpoints[0]), Scheme(parse_format("int3_g64"), parse_format("int8"), parse_format("int8"))
    calibrated = apply(decoder, scheme, "gptq", calibration=other.ids, calibration_mask=other.mask)
    plainly = apply(decoder, scheme)
    for model in (calibrated, plainly):
        as_exported(model)
    tokens, zero = text.target[:, 1:].sum(1), np.zeros(len(text.ids))
    by_hand_, plain, reference = (
        Scores(tokens, slow_losses(model, text)[1], zero, zero)
        for model in (calibrated, plainly, decoder)
    )  # fmt: skip
    assert by_method["gptq"].perplexity.value == pytest.approx(by_hand_.perplexity().value, rel=1e-4)
    share = recovered(by_hand_, plain, reference)
    if share is None:
        assert by_method["gptq"].recovered is None
    else:
        assert by_method["gptq"].recovered is not None
        assert by_method["gptq"].recovered.value == pytest.approx(share.value, abs=1e-3)
    assert by_method["rtn"].recovered is None
    columns = result.rows()[1]
    assert columns["method"] == "rtn" and columns["of rtn's loss recovered"] == "-"
    assert "method" not in compare(checkpoints[:1], text, ["3"]).rows()[1]


@pytest.mark.slow
def test_repeats(checkpoints: list[Path], text: Windows) -> None:
    whole = windows([np.random.default_rng(1).integers(1, VOCABULARY, 900)], 16, eos_id=0)
    parts = samples(whole, 20, 3)
    result = compare(
        checkpoints, text, ["3"], ["weights", "kv"], ["rtn", "gptq"], calibration=parts, repeats=3, batch_size=16
    )
    assert [(r.method, r.repeats) for r in result.results[:3]] == [("none", 1), ("rtn", 3), ("gptq", 3)]
    assert [c.repeats for c in result.contrasts] == [3, 3]
    assert result.calibration is not None and result.calibration["samples"] == 3
    scheme = Scheme(parse_format("int3_g64"), parse_format("int8"), parse_format("int8"))
    tokens, lost = text.target[:, 1:].sum(1), []
    for path in checkpoints:
        decoder = load(path)
        reference, losses = slow_losses(decoder, text)[1], []
        for order, part in enumerate(parts):
            model = apply(decoder, scheme, "gptq", part.ids, part.mask, order=order)
            as_exported(model)
            losses.append(slow_losses(model, text)[1] - reference)
        lost.append(np.stack(losses))
        row = next(r for r in result.results if (r.model, r.method) == (path.name, "gptq"))
        expected = mean(lost[-1], tokens, document=text.document)
        assert math.log(row.ratio.value) == pytest.approx(expected.value, rel=1e-3, abs=1e-5)  # float32 sums
        assert math.log(row.ratio.high) == pytest.approx(expected.high, rel=1e-2)
    alone = compare(checkpoints[1:], text, ["3"], ["weights"], ["gptq"], calibration=parts[0]).results[1]
    assert math.log(alone.ratio.value) == pytest.approx(losses[0].sum() / tokens.sum(), rel=1e-3)
    difference = mean(lost[1] - lost[0], tokens, document=text.document)  # repeat by repeat
    contrast = next(c for c in result.contrasts if c.method == "gptq")
    assert contrast.difference.low == pytest.approx(difference.low, rel=1e-2, abs=1e-5)
    with pytest.raises(DiffbitError, match="2 samples of calibration text for 3 repeats"):
        compare(checkpoints, text, ["3"], ["weights"], ["gptq"], calibration=parts[:2], repeats=3)


def test_an_artifact_runs_on_onnx_runtime(tmp_path: Path) -> None:
    """It gives what torch does in its arithmetic, and not what torch does with float inputs.

    The table stays float: numbers of an int8 one lie half-way between two codes, and either side rounds some of them
    to the other.
    """
    pico = Path(__file__).parents[3] / "examples" / "pico"
    quantize_checkpoint(pico / "diff_v1", tmp_path / "low", Scheme(parse_format("int4_g32")))
    artifact = Artifact.open(export_artifact(tmp_path / "low", tmp_path / "artifact"))
    lines = [
        f"def test_{n}(self, value={n * n}):\n    return self.check(value + {n}, [{n}, 'a{n}'])" for n in range(60)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))  # stdlib differs between releases of Python
    text = eval_windows(str(tmp_path / "text.txt"), pico / "diff_v1", 96, 5)
    paths = [pico / "diff_v1", tmp_path / "low"]
    _, low, ran = compare(paths, text, artifacts=[artifact]).results
    _, with_float_inputs = compare(paths, text, arithmetic="float").results
    assert (ran.what, ran.format, ran.method, ran.repeats) == ("artifact", "int4_g32", "rtn", 1)
    assert ran.nbytes == artifact.nbytes and ran.bits_per_weight == low.bits_per_weight
    assert math.log(ran.ratio.value) == pytest.approx(math.log(low.ratio.value), abs=1e-5)
    assert ran.kl.value == pytest.approx(low.kl.value, rel=1e-3)
    assert abs(with_float_inputs.kl.value - low.kl.value) > 20 * abs(ran.kl.value - low.kl.value)
    with pytest.raises(DiffbitError, match="the shape of"):
        compare([pico / "softmax"], text, ["int4_g32"], ["weights"], artifacts=[artifact])


def test_16_bits_alone_are_the_models_as_they_are(checkpoints: list[Path], text: Windows) -> None:
    result = compare(checkpoints, text, ["16"])
    assert [(r.model, r.format) for r in result.results] == [(path.name, "16") for path in checkpoints]


def test_each_variant_is_made_once_and_refused_ones_are_skipped(
    checkpoints: list[Path], text: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(decoder: Decoder, scheme: Scheme, method: str, *, order: int) -> Decoder:
        calls.append((scheme.weights.name if scheme.weights else "", method))
        if calls[-1][0] == "ternary":
            raise DiffbitError("ternary has no groups")
        return apply(decoder, scheme, method, order=order)

    monkeypatch.setattr(measure, "apply", counted)
    result = compare(checkpoints, text, ["3", "ternary"], ["weights"], batch_size=2, cache_bytes=1)
    assert calls == [("int3_g64", "rtn"), ("ternary", "rtn")] * 2
    assert [r.format for r in result.results] == ["16", "int3_g64"] * 2
    assert [c.format for c in result.contrasts] == ["int3_g64"]
    assert [(r.model, r.format, r.reason) for r in result.skipped] == [
        (path.name, "ternary", "ternary has no groups") for path in checkpoints
    ]
    with pytest.raises(DiffbitError, match="diff_v1: ternary has no groups"):
        compare(checkpoints, text, ["ternary"], ["weights"])


def test_low_bit_logits(checkpoints: list[Path], text: Windows) -> None:
    result = compare(checkpoints[:1], text, ["16", "8", "3", "ternary"], ["logits"])
    assert [r.format for r in result.results] == ["16", "8-bit", "3-bit"]  # ternary logits there are none
    float_, eight, three = result.results
    assert 0 < eight.kl.value < three.kl.value
    assert eight.nbytes == float_.nbytes and eight.bits_per_weight == 16


@pytest.mark.slow
def test_a_small_cache_and_another_batch_give_the_same_numbers(checkpoints: list[Path], text: Windows) -> None:
    whole = compare(checkpoints, text, ["4", "2"], batch_size=16)
    parts = compare(checkpoints, text, ["4", "2"], batch_size=2, cache_bytes=16 * VOCABULARY * 4 * 5)
    one = compare(checkpoints, text, ["4", "2"], batch_size=16, cache_bytes=1)
    for other in (parts, one):
        for a, b in zip(whole.results, other.results, strict=True):
            assert (a.model, a.format, a.nbytes) == (b.model, b.format, b.nbytes)
            assert a.perplexity.high == pytest.approx(b.perplexity.high, rel=1e-4)
            assert a.kl.value == pytest.approx(b.kl.value, rel=1e-3, abs=1e-7)


def test_padding_on_either_side_is_not_looked_at(checkpoints: list[Path], text: Windows) -> None:
    filled = int((~text.mask[-1]).sum())
    assert filled
    ids, mask, target = text.ids.copy(), text.mask.copy(), text.target.copy()
    for array in (ids, mask, target):
        array[-1] = np.roll(array[-1], filled)
    left = compare(checkpoints[:1], replace(text, ids=ids, mask=mask, target=target), ["3"])
    right = compare(checkpoints[:1], text, ["3"])
    for a, b in zip(left.results, right.results, strict=True):
        assert a.perplexity.value == pytest.approx(b.perplexity.value, rel=1e-4)


def test_sizes(checkpoints: list[Path], text: Windows) -> None:
    result = compare(checkpoints[1:], text, ["16", "4", "int4_g32", "ternary"], ["weights"])
    bits = {r.format: r.bits_per_weight for r in result.results}
    width_96 = 64 * 96 / (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)  # of the weights have a row of 96: 2 groups of 64
    assert bits["16"] == 16.0
    assert bits["int4_g64"] == pytest.approx((1 - width_96) * 4.25 + width_96 * 8 * 2 * 34 / 96)
    assert bits["int4_g32"] == 4.5
    assert bits["ternary"] < bits["int4_g64"]
    float_, four = result.results[:2]
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    table = 2 * VOCABULARY * 64, 112 * (64 + 2)  # the tied head counts once; in int8 its rows come in sixteens
    assert float_.nbytes == 2 * (linear + 5 * 64) + table[0]
    assert four.nbytes == pytest.approx(float_.nbytes - linear * (16 - four.bits_per_weight) / 8 + table[1] - table[0])


def test_outputs(checkpoints: list[Path], text: Windows, tmp_path: Path) -> None:
    result = compare(checkpoints, text, ["16", "4", "ternary"], names=["DIFF", "Transformer"])
    result.write_json(tmp_path / "c.json")
    result.write_csv(tmp_path / "c.csv")
    stored = json.loads((tmp_path / "c.json").read_text())
    assert stored["text"]["sha256"] == text.sha256 and stored["text"]["scored_tokens"] == text.scored
    assert stored["results"][1]["ratio"].keys() == {"value", "low", "high"}
    with open(tmp_path / "c.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(result.results) == len(result.rows()) == 10
    assert table[1]["recovered"] == table[1]["recovered_low"] == "" and stored["calibration"] is None
    assert float(table[1]["kl_high"]) == result.results[1].kl.high
    assert table[1]["model"] == "DIFF" and result.rows()[1]["format"] == "int4_g64"


def test_quantized_models_against_transformers(checkpoints: list[Path], text: Windows, tmp_path: Path) -> None:
    """The float model in transformers, in float64, and the same with the rounded weights in their places."""
    source, lowest = checkpoints[1], tmp_path / "int3"
    scheme = Scheme(parse_format("int4_g32"), parse_format("int8"), parse_format("int8"))
    for path, method in ((tmp_path / "a" / "int4", "rtn"), (tmp_path / "b" / "int4", "hqq")):
        quantize_checkpoint(source, path, scheme, method=method)
    quantize_checkpoint(source, lowest, replace(scheme, weights=parse_format("int3_g64")))
    paths = [tmp_path / "a" / "int4", source, lowest, tmp_path / "b" / "int4"]  # in any order
    comparison = compare(paths, text, arithmetic="float", batch_size=3)
    assert [(r.model, r.name, r.what, r.format, r.method) for r in comparison.results] == [
        ("softmax", "softmax", "none", "16", "none"),
        ("softmax", "a/int4", "checkpoint", "int4_g32", "rtn"),
        ("softmax", "int3", "checkpoint", "int3_g64", "rtn"),
        ("softmax", "b/int4", "checkpoint", "int4_g32", "hqq"),
    ]
    p, losses = slow_losses(from_transformers(source, source), text)
    tokens, by_name = text.target[:, 1:].sum(1), {}
    for result, path in zip(comparison.results[1:], (paths[0], *paths[2:]), strict=True):
        q, low = slow_losses(from_transformers(source, path), text)
        kl = np.array([float((a * np.log(a / b)).sum()) for a, b in zip(p, q, strict=True)])
        agree = np.array([int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(p, q, strict=True)])
        assert result.kl.value == pytest.approx(kl.sum() / tokens.sum(), rel=1e-4)
        assert result.kl.high == pytest.approx(mean(kl, tokens, document=text.document).high, rel=1e-3)
        assert result.agreement.value == pytest.approx(agree.sum() / tokens.sum())
        assert result.perplexity.value == pytest.approx(math.exp(low.sum() / tokens.sum()), rel=1e-5)
        expected = mean(low - losses, tokens, document=text.document)
        assert (math.log(result.ratio.value), math.log(result.ratio.low)) == pytest.approx(
            (expected.value, expected.low), rel=1e-3
        )
        by_name[result.name] = kl
    assert len(comparison.pairs) == 3
    for pair in comparison.pairs:
        expected = mean(by_name[pair.name] - by_name[pair.against], tokens, document=text.document)
        assert (pair.kl.value, pair.kl.low) == pytest.approx((expected.value, expected.low), rel=1e-3, abs=1e-7)
    rows = comparison.rows()
    assert [row["model"] for row in rows] == ["softmax", "a/int4", "int3", "b/int4"]
    assert rows[0]["format"] == "float" and rows[0]["KL"] == "-"
    assert {one.name: (one.model, one.found_by) for one in comparison.quantized} == {
        name: ("softmax", "hash") for name in by_name
    }


def from_transformers(source: Path, weights: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The logits of a llama model of transformers in float64, with the weights of a checkpoint, dequantized."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    checkpoint = Checkpoint(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = read_weight(checkpoint, name)
            parameter.copy_(weight if isinstance(weight, torch.Tensor) else weight.dequantize())
    return lambda ids: model(ids).logits


@pytest.mark.slow
def test_a_quantized_checkpoint_is_that_variant(checkpoints: list[Path], text: Windows, tmp_path: Path) -> None:
    scheme = Scheme(parse_format("int4_g32"), parse_format("int8"), parse_format("int8"))
    quantize_checkpoint(checkpoints[0], tmp_path / "low", scheme)
    comparison = compare([checkpoints[0], tmp_path / "low"], text, ["int4_g32"], ["weights"])
    whole, ours, stored = comparison.results
    assert (stored.name, stored.what, stored.format, stored.bits) == ("low", "checkpoint", "int4_g32", 4)
    assert stored.perplexity == ours.perplexity != whole.perplexity
    assert (stored.nbytes, stored.bits_per_weight, stored.cost) == (ours.nbytes, ours.bits_per_weight, ours.cost)
    assert comparison.contrasts == comparison.pairs == ()
    plot_comparison(comparison.to_dict(), tmp_path / "plot.svg")
    alone = compare([tmp_path / "low"], text, ["16"])
    assert [(r.name, r.what, r.format) for r in alone.results] == [("low", "none", "int4_g32")]
    assert alone.results[0].perplexity == stored.perplexity and alone.rows()[0]["increase"] == "-"
    with pytest.raises(DiffbitError, match="are already quantized"):
        plot_comparison(alone.to_dict(), tmp_path / "none.svg")


def test_a_checkpoint_and_its_artifact(tmp_path: Path) -> None:
    """Nearly the same row; also of a mix of formats, which is named so with its bits."""
    pico = Path(__file__).parents[3] / "examples" / "pico" / "diff_v1"
    scheme = Scheme(parse_format("int4_g32"), overrides=(("*.down_proj", parse_format("int6_g32")), ("*.q_proj", None)))
    quantize_checkpoint(pico, tmp_path / "low", scheme)
    export_artifact(tmp_path / "low", tmp_path / "low-onnx")
    rng = np.random.default_rng(0)
    text = windows([rng.integers(1, 900, 400)], 64, eos_id=0, source="made up")
    comparison = compare([tmp_path / "low-onnx", pico, tmp_path / "low"], text)
    _, ran, stored = comparison.results
    linear = {name: weight.numel() for name, weight in load(pico).named_parameters() if name.endswith("_proj.weight")}
    bits = {name: {"q_proj": 16, "down_proj": 6.5}.get(name.split(".")[-2], 4.5) for name in linear}
    average = sum(linear[name] * bits[name] for name in linear) / sum(linear.values())
    assert ran.bits_per_weight == stored.bits_per_weight == pytest.approx(average)
    assert ran.format == stored.format == f"mix, {average:.1f} bits"
    assert (ran.what, stored.what) == ("artifact", "checkpoint")
    assert ran.kl.value == pytest.approx(stored.kl.value, rel=5e-3)
    assert math.log(ran.ratio.value) == pytest.approx(math.log(stored.ratio.value), abs=2e-3)
    assert abs(ran.agreement.value - stored.agreement.value) < 0.02
    (pair,) = comparison.pairs
    assert (pair.name, pair.against) == ("low", "low-onnx") and abs(pair.kl.value) < 5e-3 * ran.kl.value


def test_bad_requests_are_refused(checkpoints: list[Path], text: Windows, tmp_path: Path) -> None:
    bad: list[tuple[str, dict]] = [
        ("many", {"bits": ["16", "many"]}),
        ("12 bits", {"bits": ["12"]}),
        ("moods", {"what": ["weights", "moods"]}),
        ("leaves nothing", {"bits": ["ternary"], "what": ["logits"]}),
        ("one checkpoint folder or more", {"paths": []}),
        ("1 names for 2 models", {"names": ["a"]}),
        ("context of 32", {"windows": windows([np.arange(1, 90)], 33, eos_id=0)}),
        ("fills one window", {"windows": windows([np.arange(1, 9)], 16, eos_id=0)}),
        ("calibrates on text", {"methods": ["rtn", "gptq"]}),
        ("method 'magic' is unknown", {"methods": ["magic"]}),
        ("context of 32", {"calibration": windows([np.arange(1, 90)], 33, eos_id=0)}),
        ("token 500", {"windows": windows([np.arange(450, 501)], 16, eos_id=0)}),
    ]
    for message, change in bad:
        with pytest.raises(DiffbitError, match=message):
            compare(**{"paths": checkpoints, "windows": text, **change})
    for index, path in enumerate(checkpoints):
        other = tmp_path / path.name
        other.mkdir()
        for file in path.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": index}}}))
    with pytest.raises(DiffbitError, match="another vocabulary"):
        compare([tmp_path / path.name for path in checkpoints], text, ["8"])


def test_one_folder_given_twice(checkpoints: list[Path], text: Windows) -> None:
    result = compare([checkpoints[0], checkpoints[0]], text, ["4"], ["weights"])
    assert [m.name for m in result.models] == ["diff_v1 (1)", "diff_v1 (2)"]
    assert result.contrasts[0].difference.value == 0.0
