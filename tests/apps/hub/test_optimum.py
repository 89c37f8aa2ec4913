"""optimum's own command line, with the command where the wheel puts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from diffbit.runtime import Session

ROOT = Path(__file__).parents[3]


def is_installed() -> bool:
    try:
        return find_spec("optimum.commands.register.diffbit") is not None
    except ModuleNotFoundError:  # no package has commands there
        return False


def optimum_cli(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    register = tmp_path / "site" / "optimum" / "commands" / "register"
    if not register.exists() and not is_installed():
        register.parent.mkdir(parents=True)
        register.symlink_to(ROOT / "optimum_command" / "register")
    script = "from optimum.commands.optimum_cli import main; main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_export(checkpoint: Path, quantized: Path, artifact: Path, tmp_path: Path) -> None:
    """The artifact is that of `diffbit quantize` and `diffbit export`."""
    export = ["export", "diffbit", "-m", checkpoint, "--weights", "int4_g32", "--kv=int8", tmp_path / "out"]
    done = optimum_cli(tmp_path, *export)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "diffbit.json").read_text())
    assert manifest["scheme"]["weights"] == "int4_g32" and manifest["scheme"]["attention"]["keys"] == "int8"
    assert manifest["name"] == "out"
    assert Session(tmp_path / "out").prefill([[1, 2, 3]]).shape[0] == 1
    options = ["--target", "webgpu", "--dtype", "fp16"]
    done = optimum_cli(tmp_path, "export", "diffbit", "-m", checkpoint, *options, tmp_path / "float")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "float" / "diffbit.json").read_text())
    assert (manifest["target"], manifest["dtype"]) == ("webgpu", "fp16")


@pytest.mark.slow
def test_errors(checkpoint: Path, tmp_path: Path) -> None:
    done = optimum_cli(tmp_path, "export", "diffbit", "-m", checkpoint, "--weights", "int9000", tmp_path / "out")
    assert done.returncode == 2 and "9000 bits, wanted 2 to 8" in done.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    done = optimum_cli(tmp_path, "export", "diffbit", "-m", checkpoint, "--weights", "int9000", tmp_path / "out")
    assert done.returncode == 2 and "already exists" in done.stderr  # said before anything is quantized
