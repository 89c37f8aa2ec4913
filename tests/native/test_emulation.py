"""The emulation of CUDA (emulate.h) computes what CUDA says, and shows the mistakes it is there for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .host import ROOT

pytestmark = pytest.mark.slow

SEEDS = range(4)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cuda, built = ROOT / "csrc/cuda", tmp_path_factory.mktemp("emulation") / "emulation"
    here = ROOT / "tests/native"
    sources = [here / "emulation.cu", here / "emulate.cpp", cuda / "device.cu"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{cuda}", f"-I{here}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, "-x", "c++", *sources, "-o", built], check=True)
    return built


def run(program: Path, name: str, seed: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DIFFBIT_EMULATE_SEED": str(seed)}
    return subprocess.run([program, name], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("name", ["product", "product of integers", "shuffles", "barrier", "copy", "shared memory"])
def test_correct_kernels_are_right_in_every_order(program: Path, name: str) -> None:
    assert [run(program, name, seed).stdout for seed in SEEDS] == ["right\n" for _ in SEEDS]


@pytest.mark.parametrize("name", ["missing barrier", "early read"])
def test_missing_barriers_change_results(program: Path, name: str) -> None:
    assert "wrong\n" in [run(program, name, seed).stdout for seed in SEEDS]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("divergent barrier", "none can go on: 24 threads ended, 40 threads wait at __syncthreads"),
        ("absent lane", "none can go on: 1 threads ended, 31 threads wait at __shfl_sync"),
        ("misaligned copy", "is no multiple of 16"),
        ("too much memory", "102400 bytes of shared memory, and a block has 101376"),
        ("memory unasked", "65536 bytes of shared memory, and the kernel was allowed no more than 49152"),
    ],
)
def test_what_a_gpu_refuses_ends_with_a_sentence(program: Path, name: str, sentence: str) -> None:
    result = run(program, name)
    assert result.returncode != 0
    assert sentence in result.stderr
