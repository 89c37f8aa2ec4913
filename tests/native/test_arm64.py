"""Whole artifacts on an emulated ARM processor: ONNX Runtime's own build, and diffbit's wheel, cross-compiled."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diffbit.apps.convert.write import convert
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint

from .host import ARM64, ROOT, build, skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into."""
    if not (ARM64 / ".complete").exists():
        skip("needs make arm64")
    folder = tmp_path_factory.mktemp("wheel")
    compiled = build("aarch64").folder
    with open(compiled / ".lock", "w") as lock:  # the library of the other tests: nothing is compiled anew
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["bash", str(ROOT / "deploy" / "wheel.sh"), "aarch64", str(folder / "dist"), sys.executable]
        done = subprocess.run(
            command, env=os.environ | {"DIFFBIT_BUILD": str(compiled)}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-manylinux_2_27_aarch64.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder / "site"),
    ]
    system = ["--only-binary=:all:", "--implementation", "py", "--platform", "manylinux_2_27_aarch64"]
    done = subprocess.run([*pip, *system, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def diffbit(*arguments: str, isa: str, installed: Path, wrapper: Path) -> str:
    """What the command prints on the emulated processor. `wrapper`: where to write how children are started there."""
    (python,) = (ARM64 / "usr" / "bin").glob("python3.*[0-9]")
    emulated = ["qemu-aarch64", "-L", str(ARM64), str(python)]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(emulated)} "$@"\n')
    wrapper.chmod(0o755)
    code = f"import sys; sys.executable = {str(wrapper)!r}; from diffbit.cli.app import main; main(sys.argv[1:])"
    environment = {name: value for name, value in os.environ.items() if name != "DIFFBIT_LIBRARY"}
    done = subprocess.run(
        [*emulated, "-c", code, *arguments],
        cwd=wrapper.parent,
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment | {"PYTHONPATH": f"{installed}:{ARM64 / 'site'}", "DIFFBIT_ISA": isa, "PYTHONNOUSERSITE": "1"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("weights", ["ternary", "int4_g32"])
def test_an_artifact_verifies_itself(weights: str, checkpoint: Path, installed: Path, tmp_path: Path) -> None:
    artifact = "nano"  # int4_g32, in the wheel
    if weights == "ternary":
        quantize_checkpoint(checkpoint, tmp_path / "quantized", Scheme(weights=parse_format(weights)))
        artifact = str(export_artifact(tmp_path / "quantized", tmp_path / "artifact"))
    isa = "neon" if weights == "ternary" else "i8mm"
    options = {"isa": isa, "installed": installed, "wrapper": tmp_path / "python"}
    result = json.loads(diffbit("verify", artifact, "--json", **options))
    assert result["native"] and result["passed"], result


def test_a_converted_model_writes_what_its_original_writes(
    trained: Callable[[str], Path], installed: Path, tmp_path: Path
) -> None:
    """The null test (tests/apps/convert) on NEON's kernels: int4 weights, an int8 cache."""
    scheme = Scheme(parse_format("int4_g32"), attention=AttentionScheme(keys="int8", values="int8"))
    options = {"isa": "neon", "installed": installed, "wrapper": tmp_path / "python"}
    texts = []
    for path in (trained("softmax"), convert(trained("softmax"), tmp_path / "diff")):
        quantize_checkpoint(path, tmp_path / f"{path.name}-q", scheme)
        artifact = export_artifact(tmp_path / f"{path.name}-q", tmp_path / f"{path.name}-onnx")
        printed = diffbit(
            "run", str(artifact), "def __init__(self", "-n", "48", "--temperature", "0", "--json", **options
        )
        texts.append(json.loads(printed)["text"])
    assert texts[0] == texts[1] and len(texts[0]) > 48
