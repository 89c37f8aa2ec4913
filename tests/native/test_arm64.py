"""Whole artifacts on an emulated ARM processor: ONNX Runtime's own build for it, our library cross-compiled."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from diffbit.export import export_artifact
from diffbit.quantize import Scheme, parse_format, quantize_checkpoint

from .host import ROOT, build, skip

pytestmark = pytest.mark.slow

ARM64 = ROOT / "build" / "native" / "arm64"


def diffbit(*arguments: str, isa: str, wrapper: Path) -> str:
    """What the command prints on the emulated processor. `wrapper`: where to write how children are started there."""
    library = build("aarch64").folder / "libdiffbit_ops.so"
    if not (ARM64 / ".complete").exists():
        skip("needs make arm64")
    (python,) = (ARM64 / "usr" / "bin").glob("python3.*[0-9]")
    emulated = ["qemu-aarch64", "-L", str(ARM64), str(python)]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(emulated)} "$@"\n')
    wrapper.chmod(0o755)
    code = f"import sys; sys.executable = {str(wrapper)!r}; from diffbit.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [*emulated, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | {
            "PYTHONPATH": str(ARM64 / "site"),
            "DIFFBIT_LIBRARY": str(library),
            "DIFFBIT_ISA": isa,
            "PYTHONNOUSERSITE": "1",
        },
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("weights", ["ternary", "int4_g32"])
def test_an_artifact_verifies_itself(weights: str, checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "quantized", Scheme(weights=parse_format(weights)))
    artifact = export_artifact(tmp_path / "quantized", tmp_path / "artifact")
    result = json.loads(diffbit("verify", str(artifact), "--json", isa="neon", wrapper=tmp_path / "python"))
    assert result["native"] and result["passed"], result
