"""Compiles csrc/ to WebAssembly, where its modules are missing or older than their sources:

    python -m diffbit.apps.web.build

It needs only the package ziglang, a C++ compiler with a library for WebAssembly. zig keeps its objects, so the next
build compiles only what changed. `diffbit web` does the same before it writes a page.

The modules import shared memory, for threads. Without threads apps/web/js/wasm/instance.js changes one byte of them,
and the same code runs in memory that is not shared."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from ...cli import print_error, remark
from ...io.errors import DiffbitError, MissingDependency
from ...io.files import write_atomic
from ...io.progress import track
from ...io.resources import default_threads

MODULE = Path(__file__).parent / "js" / "wasm" / "runtime.wasm"
RELAXED = MODULE.with_name("runtime.relaxed.wasm")  # with relaxed SIMD, which some browsers lack
SOURCE = Path(__file__).resolve().parents[2] / "csrc"
ROOMS = ("cpu", "graph", "ort", "wasm")
TARGET = "-target wasm32-wasi -msimd128 -matomics -mbulk-memory -O3"
# not -mrelaxed-simd: that is another target, for which zig would compile all of its C++ library a second time
RELAXED_SIMD = "-Xclang -target-feature -Xclang +relaxed-simd"
COMPILE = (
    "-c -std=c++17 -ffp-contract=off -fno-math-errno -Wall -Wextra -Iwasm "
    '-DDIFFBIT_ISA=wasm128 -DDIFFBIT_SIMD="wasm128.h"'
)
LINK = (
    "-mexec-model=reactor -Wl,-z,stack-size=1048576 -Wl,--strip-all -Wl,--shared-memory -Wl,--import-memory "
    "-Wl,--max-memory=4294901760 -Wl,--export=__stack_pointer,--export=__wasm_init_tls,--export=__tls_size"
)


def are_current() -> bool:
    """Whether both modules are there and no source is newer; a wheel has no sources."""
    files = [file for file in (MODULE, RELAXED) if file.is_file()]
    sources = [file.stat().st_mtime for room in ROOMS for file in (SOURCE / room).rglob("*.*")]
    return len(files) == 2 and min(file.stat().st_mtime for file in files) >= max(sources, default=0)


def check() -> None:
    """Raise DiffbitError if the modules are not current and cannot be compiled here."""
    if are_current():
        return
    if not SOURCE.is_dir():
        raise DiffbitError(
            "this installation has no kernels for WebAssembly: `make build` in a clone of diffbit compiles them; "
            "install that, or its wheel (`make wheels`)"
        )
    if importlib.util.find_spec("ziglang") is None:
        raise MissingDependency("ziglang", "web", "compiling the kernels for WebAssembly")


def bring_up_to_date() -> None:
    """Compile the modules if they are not current, and say so. Raises DiffbitError where that is impossible."""
    check()
    if not are_current():
        remark("compiling the kernels for browsers: about 3 minutes the first time (WebAssembly, by ziglang)")
        build()


def build() -> None:
    """Write both modules. Raises DiffbitError with the compiler's message."""
    sources = sorted(path.relative_to(SOURCE) for room in ROOMS for path in (SOURCE / room).rglob("*.cpp"))
    variants = {MODULE: TARGET.split(), RELAXED: f"{TARGET} {RELAXED_SIMD}".split()}
    threads = default_threads() or os.cpu_count()
    with TemporaryDirectory(prefix="diffbit-") as folder, ThreadPoolExecutor(threads) as pool:
        objects = {
            (module, source): Path(folder, f"{number}-{module.name}.o")
            for number, source in enumerate(sources)
            for module in variants
        }
        steps = [
            pool.submit(_zig, *variants[module], *COMPILE.split(), str(source), output=output)
            for (module, source), output in objects.items()
        ]
        try:
            for step in track(steps, "compiling for WebAssembly"):
                step.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        flags = f"{TARGET} {LINK}".split()
        for module in track(variants, "linking for WebAssembly"):
            with write_atomic(module) as output:
                _zig(*flags, *(str(objects[module, source]) for source in sources), output=output)


def _zig(*arguments: str, output: Path) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", *arguments, "-o", str(output)]
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True)
    if done.returncode:
        raise DiffbitError(f"ziglang cannot compile {SOURCE}:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    try:
        bring_up_to_date()
    except DiffbitError as error:
        print_error(str(error))
        raise SystemExit(2) from None
