"""The benchmarks' scripts run: small shapes, a few rounds, no peers but ONNX Runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    text = page.read_text()
    assert text.startswith("before\n<!-- kernels -->") and text.endswith("<!-- /kernels -->\nafter\n")
    assert "old" not in text and "| 256 x 256 |" in text


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
