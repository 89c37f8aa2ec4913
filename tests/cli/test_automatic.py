"""What `diffbit quantize` chooses when its user leaves the choice to it, and what it says of the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffbit import models, quantize
from diffbit.cli import automatic
from diffbit.cli.app import main
from diffbit.cli.options import read_windows
from diffbit.cli.scheme_options import MethodOptions, SchemeOptions
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models import Checkpoint
from diffbit.quantize import Scheme, resolve, table_formats
from diffbit.quantize.forecast import quantize_demand
from diffbit.quantize.methods import parse_recipe

PICO = Path(__file__).parents[2] / "examples" / "pico" / "diff_v1"
FEW = ("--max-windows", "4", "--length", "128")


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", *map(str, arguments), "--json"])
    printed = capfd.readouterr()
    assert stopped.value.code == 0, printed.err
    return dict(json.loads(printed.out))


def test_default_mix_beats_rtn_int4_in_fewer_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mix = run(capfd, PICO, *FEW, "-o", tmp_path / "mix")
    plain = run(capfd, PICO, "--weights", "int4_g32", "--method", "rtn", "-o", tmp_path / "plain")
    assert mix["method"] == "guided" and plain["method"] == "rtn"
    assert 4.5 < mix["after"]["bits_per_weight"] <= 5.1
    assert mix["after"]["nbytes"] < plain["after"]["nbytes"]
    assert mix["quality"]["kl"] < 0.7 * plain["quality"]["kl"]
    assert mix["quality"]["same_tokens"] > plain["quality"]["same_tokens"]


@pytest.mark.slow
def test_size_is_that_of_the_artifact(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(capfd, PICO, *FEW, "--size", "330kB", "--no-measure", "-o", tmp_path / "q")
    artifact = export_artifact(tmp_path / "q", tmp_path / "a")
    size = sum(file.stat().st_size for file in artifact.iterdir())
    assert 0.8 * 330_000 < size <= 330_000


def test_fast_rounds_to_five_bits_weighted_by_inputs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = run(capfd, PICO, "--fast", *FEW, "-o", tmp_path / "fast")
    assert done["method"] == "rtn" and done["calibration_tokens"] > 0
    assert Scheme.from_dict(done["scheme"]).weights == parse_format("int6_g32_s8")


def resolved(weights: str, max_memory: int | None = None, method: str = "auto", path: Path = PICO) -> str:
    scheme = SchemeOptions(weights=weights).scheme()
    return automatic.resolve_method(Checkpoint(path), scheme, MethodOptions(method=method), max_memory)


def test_the_method_is_the_best_that_fits() -> None:
    checkpoint, scheme = Checkpoint(PICO), SchemeOptions(weights="int4_g32").scheme()
    plan = resolve(checkpoint.config, scheme)
    shape = automatic.text_shape(checkpoint, MethodOptions())
    guided, gptq = (
        quantize_demand(checkpoint, plan, parse_recipe(method), shape, True).memory for method in ("guided", "gptq")
    )
    assert resolved("int4_g32", guided + 1) == "guided"
    assert resolved("int4_g32", gptq - 1) == "rtn"
    if gptq < guided:
        assert resolved("int4_g32", gptq + 1) == "gptq"
    assert resolved("int8") == resolved("int8_g32") == "rtn"
    assert resolved("int4_g32", method="hqq") == "hqq"


def test_a_model_without_a_tokenizer_is_rounded_to_nearest(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    decoder = models.load(checkpoint)
    models.save(decoder, tmp_path / "bare")
    done = run(capfd, tmp_path / "bare", "-o", tmp_path / "q")
    assert done["method"] == "rtn" and done["quality"] is None


def test_groups_of_eight_bits_hold_embedding_and_head_too() -> None:
    grouped = parse_format("int8_g32")
    assert table_formats(True, None, None, grouped) == (grouped, grouped)
    assert table_formats(True, None, "none", grouped) == (grouped, None)
    row = parse_format("int8")
    assert table_formats(True, None, None, parse_format("int4_g32")) == table_formats(True, None, None) == (row, row)
    assert table_formats(False, None, None) == (None, None)


def test_quality_is_the_divergence_by_its_definition(tmp_path: Path) -> None:
    options, rounding = SchemeOptions(weights="int3_g64"), MethodOptions(method="rtn")
    measured = automatic.quantize_model(PICO, tmp_path / "q", options, rounding).quality
    assert measured is not None
    windows, length = automatic.HELD_OUT
    text = read_windows(PICO, "mix", "text", windows, min(length, Checkpoint(PICO).config.max_position))
    rounded = quantize.load(tmp_path / "q")
    quantize.as_exported(rounded)
    ids, mask = torch.from_numpy(text.ids), torch.from_numpy(text.mask)
    scored = torch.from_numpy(text.target)[:, 1:]  # the logits at a position are of the next token
    with torch.no_grad():
        p, q = (
            F.log_softmax(model(ids, attention_mask=mask.long()).double(), -1)[:, :-1][scored]
            for model in (models.load(PICO), rounded)
        )
    assert measured.tokens == len(p) > 1000
    assert measured.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert measured.same_tokens == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=2e-3)


def test_too_little_memory_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert automatic._measured(PICO, Checkpoint(PICO), 1000) is None
    assert "the quality was not measured" in capfd.readouterr().err


@pytest.mark.slow
def test_the_mix_keeps_what_else_was_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bits", "5", "--kv", "int8", "--override", "model.layers.0.*=int8", "--no-measure"]
    done = run(capfd, PICO, *FEW, *arguments, "-o", tmp_path / "q")
    scheme = Scheme.from_dict(done["scheme"])
    assert scheme.attention.keys == "int8" and done["after"]["bits_per_weight"] <= 5.1
    formats = scheme.formats(replace(Checkpoint(PICO).config))
    assert {str(format) for name, format in formats.items() if name.startswith("model.layers.0.")} == {"int8"}
