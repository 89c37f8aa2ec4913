"""The house rules that a machine can check: who imports whom, and links and packaging against the rooms."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {"errors", "files", "progress", "version"}  # of diffbit/ itself, for every room
MAY_IMPORT: dict[str, set[str]] = {
    "ops": set(),
    "calib_data": set(),
    "models": {"ops"},
    "quantize": {"ops", "models"},
    "train": {"models", "quantize", "calib_data"},
    "export": {"ops", "models", "quantize"},
    "runtime": {"ops"},
    "evaluate": {"models", "quantize", "calib_data", "runtime"},
    "cli": {"models", "quantize", "calib_data", "train", "export", "runtime", "evaluate"},
}


def imported_rooms(source: str, depth: int) -> set[str]:
    """Rooms named by the imports of a module that lies `depth` packages below diffbit/ (1: directly in a room)."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
            continue
        else:
            continue
        absolute = [name for name in names if name.split(".")[0] in {"diffbit", *MAY_IMPORT}]
        assert not absolute, f"imports {absolute} absolutely: inside the library imports are relative"
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        depth = len(file.relative_to(ROOT).parts) - 1
        rooms = imported_rooms(file.read_text(), depth)
        wrong = rooms - MAY_IMPORT[room] - LEAVES - {room}
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_import_check_sees_a_wrong_import() -> None:
    assert imported_rooms("from ..quantize import rtn", 1) == {"quantize"}
    assert imported_rooms("def f():\n    from ...runtime.session import Session", 2) == {"runtime"}
    assert imported_rooms("from .. import runtime", 1) == {"runtime"}
    assert imported_rooms("from ..attention import x", 2) == set()  # inside the same room
    with pytest.raises(AssertionError):
        imported_rooms("import quantize.rtn", 1)


def test_runtime_needs_no_torch() -> None:
    """The device's rooms, the facade and the command line load with torch and friends out of reach."""
    script = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'safetensors', 'transformers', 'matplotlib', 'onnxruntime'):\n"
        "    sys.modules[name] = None\n"
        "import diffbit, diffbit.cli, diffbit.runtime\n"
        "from diffbit.runtime import Session, generate, verify, bench\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_and_packaging_name_every_room() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "diffbit").iterdir() if path.is_symlink()}
    assert links == {room: f"../{room}" for room in MAY_IMPORT}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == {"diffbit": "diffbit"} | {f"diffbit/{room}": room for room in MAY_IMPORT}
    assert set(build["sdist"]["exclude"]) == {f"diffbit/{room}" for room in MAY_IMPORT}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone knows which files are the repository's")
def test_the_tree_stays_small() -> None:
    """6 MiB: what travels to a GPU machine may be 64, of which packed onnxruntime-gpu takes 57.5 (docs/gpu.md)."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0")[:-1]]
    total = sum(file.lstat().st_size for file in files if file.is_symlink() or file.exists())
    assert total < 6 << 20, f"{total} bytes: let a command make the largest files"
