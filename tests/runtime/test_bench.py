from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Session, bench

from .stand_in import install_driver
from .toy import random_toy

bench_module = importlib.import_module("diffbit.runtime.bench")  # the package's `bench` is its function


def test_a_row_has_speeds_sizes_and_memory(artifact: Path) -> None:
    row = bench(artifact, prompt_tokens=10, new_tokens=8, repeats=2, threads=1, memory=10**6)
    json.dumps(row)
    assert row["model_bytes"] == sum(path.stat().st_size for path in artifact.iterdir()) - (
        (artifact / "diffbit.json").stat().st_size
    )
    assert row["kv_bytes_per_1k_tokens"] == 1000 * 2 * 32 * 4 and row["kv_fixed_bytes"] == 0
    assert row["longest_context_tokens"] == (10**6 - row["model_bytes"]) // 256
    assert row["prefill_tokens_per_s"] == pytest.approx(10 / row["time_to_first_token_s"])
    assert row["decode_tokens_per_s"] > 0
    assert row["load_s"] > 0


def test_peak_memory_is_the_childs_own(tmp_path: Path) -> None:
    folder = random_toy().write(tmp_path / "a")
    ballast = np.ones(400 * 2**20, np.uint8)  # resident here, not there
    row = bench(folder, prompt_tokens=4, new_tokens=2, repeats=1, threads=1)
    assert 20 * 2**20 < row["peak_host_memory_bytes"] < ballast.nbytes


def test_on_a_gpu_the_cards_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that finds 1000 bytes more in use each time it is asked; the model itself runs here."""
    install_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(bench_module, "Session", lambda artifact, options: Session(artifact, threads=1))
    row = bench_module._measure(str(random_toy().write(tmp_path / "a")), 4, 2, 3, {"device": "cuda"})
    assert row["peak_device_memory_bytes"] == 4 * 1000  # after three repeats, and one to warm up
    assert row["peak_host_memory_bytes"] > 20 * 2**20
    assert "peak_device_memory_bytes" not in bench_module._measure(str(tmp_path / "a"), 4, 2, 1, {})


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    folder = random_toy().write(tmp_path / "a")
    with pytest.raises(DiffbitError, match="20 prompt tokens and 6 new ones do not fit the context of 24"):
        bench(folder, prompt_tokens=20, new_tokens=6)
    with pytest.raises(DiffbitError, match="repeats is 0"):
        bench(folder, repeats=0)
    with pytest.raises(DiffbitError, match="device is 'tpu', wanted one of cpu, cuda"):
        bench(folder, prompt_tokens=4, new_tokens=2, device="tpu")
    (folder / "model.onnx").unlink()
    with pytest.raises(DiffbitError, match=r"model\.onnx: is listed in diffbit\.json but missing"):  # said by the child
        bench(folder, prompt_tokens=4, new_tokens=2)


def test_importing_the_runtime_loads_neither_torch_nor_onnxruntime() -> None:
    code = (
        "import sys, diffbit.runtime; print(sorted({'torch', 'onnx', 'onnxruntime', 'tokenizers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
