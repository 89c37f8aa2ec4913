"""Builds of the library with its stand-in for ONNX Runtime (host.cpp), and nodes run in them.

    build("sanitized").run(nodes, isa="avx2", threads=2)      name -> outputs, or the sentence of an error

A build lies in build/native/<kind>; each process brings it up to date once, and processes that test at once share it.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ml_dtypes
import numpy as np
import pytest

from .nodes import Node

ROOT = Path(__file__).parents[2]
NUMPY = (np.float32, np.uint8, np.int8, np.int64, np.float16, np.float64, ml_dtypes.bfloat16)
TYPES = {code: np.dtype(dtype) for code, dtype in zip((1, 2, 3, 7, 10, 11, 16), NUMPY, strict=True)}  # ONNX's code
CODES = {dtype: code for code, dtype in TYPES.items()}
REQUIRE = "DIFFBIT_REQUIRE_CROSS"  # set where a missing tool must fail the tests, as in CI

MUSL = "/lib/ld-musl-x86_64.so.1"  # its loader
ARM64 = ROOT / "build" / "native" / "arm64"  # make arm64
WINE = ROOT / "build" / "native" / "wine"  # what wine takes for a disk with Windows
# without its messages about what a program asks it for
WINE_ENVIRONMENT = {"WINEPREFIX": str(WINE), "WINEDEBUG": "-all"}


def _by_zig(target: str) -> list[str]:
    toolchain = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'csrc' / 'zig.cmake'}", f"-DDIFFBIT_PYTHON={sys.executable}"]
    return ["-G", "Unix Makefiles", "-DDIFFBIT_CUDA=OFF", f"-DDIFFBIT_TARGET={target}", *toolchain]


# what CMake is told, what runs the result, and the packages of Debian that bring the tools
KINDS = {
    # avxvnni shares its source with avx2 but for one product
    "sanitized": (
        [
            "-DDIFFBIT_SANITIZE=address,undefined",
            "-DDIFFBIT_INSTRUCTION_SETS=amx;avx512vnni;avx2;neon",
            "-DDIFFBIT_EMULATE_TILES=ON",  # on any CPU, and sanitizers do not see what a tile's instruction reads
        ],
        [],
        {"c++": "g++"},
    ),
    "threads": (["-DDIFFBIT_SANITIZE=thread", "-DDIFFBIT_INSTRUCTION_SETS=avx2;neon"], [], {"c++": "g++"}),
    "emulated": (["-DDIFFBIT_CUDA=OFF", "-DDIFFBIT_INSTRUCTION_SETS=none"], [], {"c++": "g++"}),
    "aarch64": (
        ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"],
        ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
        {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"},
    ),
    # by ziglang (csrc/zig.cmake): what Windows and Alpine load, on wine and on Debian's copy of musl
    "x86_64-windows": (_by_zig("x86_64-windows-gnu"), ["wine"], {"wine": "wine wine64"}),
    "x86_64-musl": (_by_zig("x86_64-linux-musl"), [MUSL], {MUSL: "musl"}),
    "aarch64-musl": (_by_zig("aarch64-linux-musl"), ["qemu-aarch64", "-L", str(ARM64)], {"qemu-aarch64": "qemu-user"}),
}


@dataclass(frozen=True)
class Build:
    """A built host and library."""

    folder: Path
    runner: tuple[str, ...]
    library: Path
    host: Path

    def _call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [*self.runner, str(self.host), str(self.library), *arguments]
        environment = {
            **os.environ,
            # memory that nobody wrote is no longer zero by chance
            "ASAN_OPTIONS": "max_malloc_fill_size=1073741824:malloc_fill_byte=255",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TSAN_OPTIONS": "halt_on_error=1",
            **WINE_ENVIRONMENT,
            **environment,
        }
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)

    @functools.cached_property
    def instruction_sets(self) -> list[str]:
        done = self._call()
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def run(
        self, nodes: Iterable[Node], isa: str, threads: int, options: Mapping[str, str] = {}
    ) -> dict[str, list[np.ndarray] | str]:
        """Each node's outputs, or its error; a crash fails with the sanitizer's report and the node's name. options: of
        the session, by name."""
        return self._run(nodes, str(threads), DIFFBIT_ISA=isa, **options)

    def run_cuda(self, nodes: Iterable[Node], seed: int = 0) -> dict[str, list[np.ndarray] | str]:
        """The same on the emulated GPU of build("emulated"), whose threads run in an order that the seed says."""
        return self._run(nodes, "1", "CUDAExecutionProvider", DIFFBIT_EMULATE_SEED=str(seed))

    def _run(self, nodes: Iterable[Node], *arguments: str, **environment: str) -> dict[str, list[np.ndarray] | str]:
        with tempfile.TemporaryDirectory() as folder:
            recorded, results = Path(folder) / "nodes", Path(folder) / "results"
            recorded.write_bytes(b"".join(map(record, nodes)))
            done = self._call(str(recorded), str(results), *arguments, **environment)
            results_of = read_results(results.read_bytes()) if results.exists() else {}
            if done.returncode != 0 or done.stderr:
                last = list(results_of)[-1] if results_of else "none"
                pytest.fail(f"exit status {done.returncode} in the node {last}:\n{done.stderr[:6000]}")
            return results_of


def record(node: Node) -> bytes:
    lines = [f"node {node.name} {node.op}\n".encode()]
    for name, value in node.attributes.items():
        text = f"integer {name} {value}" if isinstance(value, int) else f"number {name} {float(value).hex()}"
        lines.append(f"{text}\n".encode())
    for array in node.inputs.values():
        if array is None:
            lines.append(b"omitted\n")
        else:
            header = " ".join(map(str, ("input", CODES[array.dtype], *array.shape)))
            lines += [f"{header}\n".encode(), np.ascontiguousarray(array).tobytes(), b"\n"]
    for output in node.outputs:
        if output is None:
            lines.append(b"output 0\n")
            continue
        shared = "" if output.shared is None else f" {list(node.inputs).index(output.shared)}"
        lines.append(f"output {CODES[output.dtype]}{shared}\n".encode())
    return b"".join([*lines, b"end\n"])


def read_results(data: bytes) -> dict[str, list[np.ndarray] | str]:
    outputs_of: dict[str, list[np.ndarray] | str] = {}
    at = 0
    outputs: list[np.ndarray] = []
    while at < len(data):
        stop = data.index(b"\n", at)
        what, _, rest = data[at:stop].decode().partition(" ")
        at = stop + 1
        if what == "node":
            name, outputs = rest, []
            outputs_of[name] = outputs
        elif what == "error":
            outputs_of[name] = rest
        elif what == "output":
            code, *shape = map(int, rest.split())
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(data, TYPES[code], count, at).reshape(shape)
            outputs.append(array)
            at += array.nbytes + 1
    return outputs_of


def skip(reason: str) -> NoReturn:
    """Skips the test; where nothing may be missing, fails it."""
    if os.environ.get(REQUIRE):
        pytest.fail(f"{REQUIRE} is set, but the test {reason}")
    pytest.skip(reason)


@functools.cache
def build(kind: str) -> Build:
    """The host and the library, built from the sources as they are now; skips, or fails in CI, without the tools."""
    options, runner, tools = KINDS[kind]
    missing = [package for tool, package in tools.items() if not shutil.which(tool)]
    if missing:
        skip(f"needs apt-get install --no-install-recommends {' '.join(missing)}")
    if any("zig.cmake" in option for option in options) and importlib.util.find_spec("ziglang") is None:
        skip("needs pip install ziglang")
    if "wine" in runner:
        windows_disk()
    if kind == "aarch64-musl" and not (ARM64 / "lib" / "ld-musl-aarch64.so.1").exists():
        skip("needs make arm64, after rm -r build/native/arm64 if that is there")
    library = "diffbit_ops_emulated" if kind == "emulated" else "diffbit_ops"
    folder = build_in(kind, options, library, "diffbit_host")
    names = (f"{library}.dll", "diffbit_host.exe") if "wine" in runner else (f"lib{library}.so", "diffbit_host")
    return Build(folder, tuple(runner), *(folder / name for name in names))


def windows_disk() -> None:
    """Let wine make its disk, once."""
    WINE.parent.mkdir(parents=True, exist_ok=True)
    with open(WINE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (WINE / "system.reg").exists():
            subprocess.run(["wine", "wineboot", "--init"], env=os.environ | WINE_ENVIRONMENT, capture_output=True)


@functools.cache
def emulated() -> Path:
    """The CUDA kernels as a library that takes pointers to the host's memory."""
    options, _, tools = KINDS["emulated"]
    if not shutil.which("c++"):
        skip(f"needs apt-get install --no-install-recommends {tools['c++']}")
    return build_in("emulated", options, "diffbit_cuda_emulated") / "libdiffbit_cuda_emulated.so"


def build_in(name: str, options: list[str], *targets: str) -> Path:
    """The folder of a build, brought up to date; a test in another process waits."""
    folder = ROOT / "build" / "native" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), "-DDIFFBIT_TESTS=ON", *options],
            ["cmake", "--build", str(folder), "-j2", "--target", *targets],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return folder
