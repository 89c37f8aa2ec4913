"""The picture of a run of quantization-aware training, on runs made here: what it says is counted anew by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit import DiffbitError
from diffbit.cli import main
from diffbit.evaluate import ReportData, is_run, plots, read_run, style
from diffbit.evaluate.report import render
from diffbit.models import Checkpoint, Decoder, ModelConfig, save
from diffbit.quantize import Scheme, parse_format, quantize_checkpoint, read_weight, rounding_for, spread

from .test_report import Page

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=96,
    max_position=32, attention="diff_v1",
)  # fmt: skip
KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_run(folder: Path, format: str, activations: str | None = None, steps: int = 1000) -> Path:
    """What a run leaves: a quantized model, its master and a log."""
    torch.manual_seed(0)
    save(Decoder(CONFIG), folder / "float", dtype=torch.float32)
    out = folder / f"{format}-{activations}"
    quantize_checkpoint(folder / "float", out, Scheme(weights=parse_format(format), activations=activations))
    (folder / "float").rename(out / "master")
    with (out / "log.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            log.write(json.dumps({"step": step, "loss": 3.0, "flips": 0.02 / step, "zeros": 0.31}) + "\n")
        log.write('{"step": 10')  # a run that was killed
    return out


@pytest.mark.parametrize(("format", "activations"), [("ternary", None), ("ternary", "int4"), ("int4_g32", None)])
def test_counts_by_hand(tmp_path: Path, format: str, activations: str | None) -> None:
    out = write_run(tmp_path, format, activations)
    run = read_run(out)
    assert list(run["kinds"]) == KINDS and run["format"] == format
    assert run["values"] == ([-1, 0, 1] if format == "ternary" else list(range(-8, 8)))
    for kind, found in run["kinds"].items():
        codes, places = [], []
        for layer in range(2):
            room = "self_attn" if kind in KINDS[:4] else "mlp"
            name = f"model.layers.{layer}.{room}.{kind}.weight"
            weight = read_weight(Checkpoint(out), name)
            exact = Checkpoint(out / "master").read(name)
            exact = spread(exact, rounding_for(name.removesuffix(".weight"), exact.shape[1], activations))
            for row, column in np.ndindex(*weight.shape):
                group = column // (weight.format.group_size or 10**9)
                scale = float(weight.scale[0 if format == "ternary" else row, group])
                codes.append(int(weight.codes[row, column]))
                places.append(float(exact[row, column]) / scale)
            wrong = torch.linalg.norm(exact - weight.dequantize()) / torch.linalg.norm(exact)
            (entry,) = (entry for entry in run["weights"] if entry["name"] == name)
            assert entry["weight_error"] == pytest.approx(float(wrong), rel=1e-4)
        for code, share in enumerate(found["shares"]):
            assert share == pytest.approx(codes.count(code) / len(codes))
        inside = [x for x in places if run["edges"][0] <= x <= run["edges"][-1]]
        assert sum(found["counts"]) == pytest.approx(len(inside), abs=2)  # float32 on an edge
        assert sum(found["counts"]) > 0.98 * len(places)
        # a weight's code is what the thresholds say
        said = [sum(x > threshold for threshold in run["thresholds"]) for x in places]
        assert np.mean(np.array(said) == codes) > 0.999


def test_curves_are_means_of_neighbouring_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, "ternary", steps=1200))
    assert len(run["steps"]) == len(run["flips"]) == 400
    assert run["steps"][0] == 2 and run["flips"][0] == pytest.approx(0.02 * (1 + 1 / 2 + 1 / 3) / 3)
    assert run["zeros"] == pytest.approx([0.31] * 400)


@pytest.mark.parametrize("format", ["ternary", "int4_g32"])
def test_the_report_shows_it(tmp_path: Path, format: str) -> None:
    out = write_run(tmp_path, format)
    run = read_run(out)
    text = render(ReportData(qat={"a <run>": run}))
    page = Page(text)
    assert page.headings == ["Trained at low bits", "Error of each layer"] and "<run>" not in text
    assert page.tags.count("svg") == 4 and page.text.count("down_proj") >= 3
    assert "a &lt;run&gt;: 1.22% first, 0.00% last." in text
    with style.panels() as (_, (axes,)):
        plots.distribution(axes, run)
        shares = [label.get_text() for label in axes.texts]
        assert len(shares) == (3 * 7 if format == "ternary" else 0)
        assert len(axes.patches) == 7 * len(run["values"])  # a piece of each histogram for each code


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    out = write_run(tmp_path, "ternary")
    assert is_run(out) and not is_run(out / "master")
    with pytest.raises(DiffbitError, match=r"holds no log.jsonl and master/"):
        read_run(out / "master")
    (out / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(DiffbitError, match="holds no step"):
        read_run(out)
    (out / "log.jsonl").write_text("nothing\n")
    with pytest.raises(DiffbitError, match="is no log of a run"):
        read_run(out)


def test_compare_takes_runs(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "b158"
    quantize_checkpoint(checkpoint, run, Scheme(weights=parse_format("ternary")))
    shutil.copytree(checkpoint, run / "master")
    (run / "log.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0, "flips": 0.5, "zeros": 0.25}) + "\n")
    options = ["--what", "weights", "--bits", "16,ternary", "--max-windows", "2", "--length", "32", "--quiet", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(["compare", str(checkpoint), *options, "--quantized", str(run), "-o", str(tmp_path / "report")])
    page = (tmp_path / "report" / "report.html").read_text()
    assert "b158: float weights behind ternary codes" in page and "b158: 50.0% first, 50.0% last." in page
    assert "b158, relative error of weights" in page
    whole, ternary = json.loads((tmp_path / "report" / "comparison.json").read_text())["results"]
    assert ternary["cost"]["weight_bytes"] < whole["cost"]["weight_bytes"]
    assert whole["cost"]["floating"] - ternary["cost"]["floating"] == ternary["cost"]["ternary"] > 0
