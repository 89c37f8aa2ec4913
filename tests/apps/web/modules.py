"""The WebAssembly module as its sources are now, and Node.js to run it."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from diffbit.apps.web.build import MODULE, RELAXED, bring_up_to_date

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent


@functools.cache
def module(relaxed: bool = False) -> Path:
    """The module, or that with relaxed SIMD. Compiles both if a source has changed; skips, or fails in CI, without
    the tools."""
    lacking = [] if shutil.which("node") else ["node"]
    if importlib.util.find_spec("ziglang") is None:
        lacking.append("ziglang (pip install ziglang)")
    if lacking:
        (pytest.fail if os.environ.get("DIFFBIT_REQUIRE_WEB") else pytest.skip)(f"needs {' and '.join(lacking)}")
    folder = ROOT / "build" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "wasm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bring_up_to_date()
    return RELAXED if relaxed else MODULE


def node(script: str, *arguments: object) -> str:
    """What a script here prints."""
    # relaxed SIMD in Node.js 20, whose quick compiler computes other products with it
    flags = ("--experimental-wasm-relaxed-simd", "--no-liftoff") if str(RELAXED) in map(str, arguments) else ()
    command = ["node", *flags, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout
