"""The benchmarks' scripts run: small shapes, a few rounds, no peers but ONNX Runtime."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffbit.quantize import methods
from diffbit.runtime import native

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_kernels(tmp_path: Path) -> None:
    page, rows_file = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("before\n<!-- kernels -->\nold\n<!-- /kernels -->\nafter\n")
    done = run("kernels.py", "--quick", "--json", str(rows_file), "--markdown", str(page))
    if not native.instruction_sets():
        assert done.returncode == 1 and "native library is not installed" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = json.loads(rows_file.read_text())["rows"]
    by_op = {op: [row for row in rows if row["op"] == op] for op in {row["op"] for row in rows}}
    assert by_op.keys() >= {"read", "ternary", "int4_g32", "attention fp32", "attention fp16"}
    assert all(row["gb_per_s"] > 0 for row in by_op["read"])
    assert {(row["tokens"], row["threads"]) for row in by_op["ternary"]} == {(1, 1), (1, 2), (4, 1), (4, 2)}
    for op, peers in (("ternary", {"body", "ORT 2-bit"}), ("int4_g32", {"ORT 4-bit"}),
                      ("attention fp32", {"body", "two calls"})):  # fmt: skip
        for row in by_op[op]:
            assert row["ratio"].keys() >= peers and min(row["ratio"].values()) > 0
    caches = {(row["kv"], row["threads"]): row for row in by_op["caches"]}
    kinds = {"fp32", "fp16", "int8", "int4", "int2", "int8 + qk int8", "int4 + qk int8"}
    assert caches.keys() == {(kind, threads) for kind in kinds for threads in (1, 2)}
    assert caches["int4", 1]["mb"] < caches["fp32", 1]["mb"] and caches["int4", 1]["ratio"].keys() == {"fp32", "fp16"}
    text = page.read_text()
    assert text.startswith("before\n<!-- kernels -->") and text.endswith("<!-- /kernels -->\nafter\n")
    assert "old" not in text and "| 256 x 256 |" in text


def test_bitnet_folder(tmp_path: Path) -> None:
    done = run("bitnet_folder.py", "--quick", "--work", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["folder"] for row in rows if "folder" in row] == ["fp32", "fp16", "again"]
    assert all(row["peak_rss_mib"] > 0 for row in rows if "command" in row)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"]["linear_class"] == "autobitlinear"


def test_base3(tmp_path: Path) -> None:
    done = run("base3.py", "--quick", "--work", str(tmp_path / "work"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    bytes_of = {row["storage"]: row["bytes"] for row in rows}
    assert len(rows) == 4 and bytes_of["base3"] < bytes_of["2bit"]


def test_long_context(tmp_path: Path) -> None:
    page, rows_file = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("<!-- long_context_softmax -->\nold\n<!-- /long_context_softmax -->\n")
    caches = ("--attention", "softmax", "--caches", "fp32", "fp16", "int4")
    written = ("--json", str(rows_file), "--markdown", str(page))
    done = run("long_context.py", "--quick", "--work", str(tmp_path / "work"), *caches, *written)
    if not native.instruction_sets():
        assert done.returncode == 1 and "native library is not installed" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = {row["cache"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert rows.keys() == {"fp32", "fp16", "int4"} and rows["int4"]["ratio"].keys() == {"fp32", "fp16"}
    # 4 layers, 4 heads of 32: 4 bytes a number, 2, and 5 bits
    assert [row["kv_bytes_per_1k_tokens"] // 1000 for row in rows.values()] == [4096, 2048, 640]
    assert "| int4 " in page.read_text() and "old" not in page.read_text()


def test_stock_cache(nano: Callable[[str], Path], tmp_path: Path) -> None:
    done = run("stock_cache.py", "--quick", "--models", str(nano("diff_v2")), "--json", str(tmp_path / "rows.json"))
    if not native.instruction_sets():
        assert done.returncode == 1 and "native library is not installed" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    about, *rows = json.loads((tmp_path / "rows.json").read_text())
    assert about["check_int8"] < 1e-5 and about["check_int4"] < 1e-5  # the operator computes what is measured
    changes = {row["cache"]: row["change"] for row in rows if "change" in row}
    assert changes["DiffAttention int4"] < changes["GroupQueryAttention int4, a scale a tensor"]
    assert all(row["ratio"] > 0 for row in rows if "ratio" in row) and len(rows) == 6 + 6


def test_bitnet(checkpoint: Path, tmp_path: Path) -> None:
    from diffbit.models import Decoder, load, save
    from diffbit.quantize import Scheme, parse_format, quantize_checkpoint

    def write(name: str, format: str | None, seed: int) -> None:
        torch.manual_seed(seed)
        attention = "softmax" if name.startswith("softmax") else "diff_v1"
        config = replace(load(checkpoint).config, attention=attention, sub_norms=format == "ternary")
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
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    rows = {(row["model"], row["kind"]): row for row in found["rows"]}
    kinds = ["float", "ternary", "distilled", "int4"]
    assert list(rows) == [("Transformer", kind) for kind in kinds[:2]] + [("DIFF v1", kind) for kind in kinds]
    ternary, exact = rows["DIFF v1", "ternary"], rows["DIFF v1", "float"]
    assert exact["ratio"] is None and exact["decode_tokens_per_s"] > 0
    wanted = ternary["perplexity"]["value"] / exact["perplexity"]["value"]
    assert ternary["ratio"]["value"] == pytest.approx(wanted) and ternary["closed"] is None
    assert sum(part["bytes"] for part in ternary["parts"]) == ternary["nbytes"] < exact["nbytes"]
    assert ternary["cost"]["ternary"] > 0 == exact["cost"]["ternary"]
    assert rows["DIFF v1", "int4"]["cost"]["integer"] == ternary["cost"]["ternary"]
    (contrast,) = found["contrasts"]
    other = rows["Transformer", "ternary"]["ratio"]["value"]
    assert (contrast["model"], contrast["kind"]) == ("DIFF v1", "ternary")
    assert contrast["difference"]["value"] == pytest.approx(math.log(wanted / other), abs=1e-9)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "\nold\n" not in text
    assert "| ternary codes " in text and "int4: perplexity at most 1% up" in text and "tokens/s" in text

    done = run("bitnet.py", str(tmp_path / "nothing"))
    assert done.returncode == 1 and "holds no model named like" in done.stderr


def test_accuracy(nano: Callable[[str], Path], tmp_path: Path) -> None:
    page, numbers = tmp_path / "accuracy.md", tmp_path / "out" / "accuracy.json"
    names = re.findall(r"<!-- (\w+) -->", (BENCHMARKS.parent / "docs" / "accuracy.md").read_text())
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names))
    models = ("--models", str(nano("softmax")), str(nano("diff_v1")))
    done = run("accuracy.py", "--quick", *models, "--jobs", "2", "--json", str(numbers), "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    loss = {(r["model"], r["format"], r["method"]): r["ratio"]["value"] for r in found["results"]}
    for model in ("Transformer", "DIFF v1"):
        assert 1 < loss[model, "int2_g64", "gptq"] < loss[model, "int2_g64", "rtn"]
    assert {c["model"] for c in found["contrasts"]} == {"DIFF v1"} and found["calibration"]["windows"] == 8
    text = page.read_text()
    assert "| int2_g64 " in text and "DIFF v1 − Transformer" in text and "inputs" in text
    assert page.with_suffix(".svg").read_text().count("Transformer") == 1


def test_a_method_joins_the_tables_of_accuracy_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    accuracy = importlib.import_module("accuracy")
    assert set(methods()) >= accuracy.ELSEWHERE and accuracy.recipes() == accuracy.RECIPES
    monkeypatch.setattr(accuracy, "methods", lambda: (*methods(), "newcomer"))
    assert accuracy.recipes() == {**accuracy.RECIPES, "newcomer": accuracy.LOW}


def test_mixed(checkpoint: Path, tmp_path: Path) -> None:
    page, numbers = tmp_path / "accuracy.md", tmp_path / "mixed.json"
    page.write_text("<!-- mixed -->\nold\n<!-- /mixed -->\n")
    options = ("--methods", "rtn", "--bits", "3", "--windows", "4", "--jobs", "1")
    done = run("mixed.py", str(checkpoint), *options, "--json", str(numbers), "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    *uniform, mixed = json.loads(numbers.read_text())
    assert [row["weights"] for row in uniform] == ["int2_g64", "int3_g64", "int3_g32", "int4_g128"]
    assert 2.9 < mixed["bits_per_weight"] <= 3 and mixed["plan"]["bits_per_weight"] == mixed["bits_per_weight"]
    assert set(mixed["differences"]) == {row["weights"] for row in uniform}
    assert "old" not in page.read_text() and "mixed, 3 bits" in page.read_text()


def test_attention(nano: Callable[[str], Path], tmp_path: Path) -> None:
    page, numbers = tmp_path / "attention.md", tmp_path / "out" / "attention.json"
    names = re.findall(r"<!-- ([a-z]+) -->", (BENCHMARKS.parent / "docs" / "attention.md").read_text())
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names))
    options = ("--length", "96", "--windows", "2", "--jobs", "1")
    models = (str(nano("softmax")), str(nano("diff_v1")))
    done = run("attention.py", *models, *options, "--json", str(numbers), "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    kl = {(row["model"], row["what"], row["label"]): row["kl"]["value"] for row in found["rows"] if "kl" in row}
    for model in ("Transformer", "DIFF v1"):
        assert 0 < kl[model, "logits", "8 bits"] < kl[model, "logits", "3 bits"]
        assert 0 < kl[model, "kv", "int4, window 0"] < kl[model, "kv", "int2, window 0"]
        assert kl[model, "qk", "K smoothing, nothing rounded"] < 1e-6
        smoothed = kl[model, "qk", "int4 rows, a step per token, K smoothing"]
        assert 0 < smoothed < kl[model, "qk", "int4 rows, a step per token"]
    assert {row["model"] for row in found["rows"] if row["what"] == "branches"} == {"DIFF v1"}
    assert {row["model"] for row in found["contrasts"]} == {"DIFF v1"}
    text = page.read_text()
    assert set(names) == {row["what"] for row in found["rows"]} and "\nold\n" not in text
    assert "| cache int4, DIFF v1 " in text

    options = ("--what", "logits", "--length", "512", "--windows", "2", "--jobs", "1", "--needles", "2")
    done = run("attention.py", str(nano("../nano_1k/diff_v1")), *options, "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    rows = json.loads(numbers.read_text())["rows"]
    assert len(rows) == 7 and all(0 <= row["found"]["value"] <= 1 for row in rows)
    assert rows[0]["change"]["value"] == 0 and "Needles found" in done.stdout


def test_generate(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    arguments = ("--work", str(tmp_path / "work"), "--quick", "--only", "ternary", "--threads", "1", "--rounds", "1")
    done = run("generate.py", *arguments, "--json", str(rows_file))
    if not native.instruction_sets():
        assert done.returncode == 1 and "native library is not installed" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert rows.keys() == {"ternary", "ternary bodies"}
    assert all(row["decode_tokens_per_s"] > 0 and row["peak_memory_mib"] > 0 for row in rows.values())
    assert "| ternary bodies |" in done.stdout
