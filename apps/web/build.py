"""Compiles csrc/ to WebAssembly: `python -m diffbit.apps.web.build`. It needs only the package ziglang, a
C++ compiler with a library for WebAssembly; zig keeps its objects, so the next build compiles only what changed.

The modules import shared memory, for threads. Without threads apps/web/js/wasm/instance.js changes one byte of them,
and the same code runs in memory that is not shared."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from ...io.errors import DiffbitError

MODULE = Path(__file__).parent / "js" / "wasm" / "runtime.wasm"
RELAXED = MODULE.with_name("runtime.relaxed.wasm")  # with relaxed SIMD, which some browsers lack
SOURCE = Path(__file__).resolve().parents[2] / "csrc"
ROOMS = ("cpu", "ort", "wasm")
# not -mrelaxed-simd: that is another target, for which zig would compile all of its C++ library a second time
RELAXED_SIMD = "-Xclang -target-feature -Xclang +relaxed-simd"
FLAGS = (
    "-target wasm32-wasi -msimd128 -matomics -mbulk-memory -std=c++17 -O3 -ffp-contract=off -fno-math-errno "
    "-Wall -Wextra "
    '-DDIFFBIT_ISA=wasm128 -DDIFFBIT_SIMD="wasm128.h" '
    "-mexec-model=reactor -Wl,-z,stack-size=1048576 -Wl,--strip-all -Wl,--shared-memory -Wl,--import-memory "
    "-Wl,--max-memory=4294901760 -Wl,--export=__stack_pointer,--export=__wasm_init_tls,--export=__tls_size"
)


def build() -> None:
    """Write both modules. Raises DiffbitError without the sources or the compiler, or with its message."""
    sources = sorted(path.relative_to(SOURCE) for room in ROOMS for path in (SOURCE / room).rglob("*.cpp"))
    if not sources:
        raise DiffbitError(f"{SOURCE}: has no sources; the module is compiled in a clone of diffbit")
    if importlib.util.find_spec("ziglang") is None:
        raise DiffbitError("compiling for WebAssembly needs a compiler: pip install ziglang")
    command = [sys.executable, "-m", "ziglang", "c++", *FLAGS.split(), "-Iwasm", *map(str, sources)]
    for output, more in ((MODULE, ""), (RELAXED, RELAXED_SIMD)):
        whole = [*command, *more.split(), "-o", str(output.resolve())]
        done = subprocess.run(whole, cwd=SOURCE, capture_output=True, text=True)
        if done.returncode:
            raise DiffbitError(f"ziglang cannot compile {SOURCE}:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    build()
