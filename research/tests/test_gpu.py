"""gpu.py on a CPU: small sizes, over the kernels' own source, which tests/native/emulate.h compiles."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diffbit.io.errors import DiffbitError
from diffbit.runtime import native, verify
from research.tests.scripts import run
from tests.native import cuda
from tests.native.host import emulated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """gpu.py and what it imports, as modules of a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.syspath_prepend(str(ROOT / "research" / "gpu"))
        yield importlib.import_module("gpu")


@pytest.fixture(scope="module")
def parts(gpu: Any) -> Any:
    return importlib.import_module("gpu_parts")


@pytest.fixture(scope="module")
def emulated_bench(parts: Any) -> Any:
    """The benchmark over the kernels' own source on the CPU (tests/native/emulate.h): small sizes, another clock."""
    return parts.Bench("cpu", parts.HostClock(), cuda.Kernels(emulated()), parts.QUICK)


def dry_run(gpu: Any, folder: Path, *names: str) -> list[dict[str, Any]]:
    """The rows of one of the commands of README.md, with --quick on a CPU."""
    page = (ROOT / "research" / "gpu" / "README.md").read_text()
    assert f"python3 research/gpu/gpu.py {' '.join(names)} --out" in page
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
    assert int4["bytes"] == 64 * (2 * 64 + 8) + 33 * 8 * 64  # 64 tokens are codes, with four scales of 2 bytes each
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
