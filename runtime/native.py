"""The native library: diffbit's operators as kernels for ONNX Runtime (csrc/), for the CPU and for NVIDIA GPUs.

The package builds it if there is a C++ compiler, with kernels for GPUs if there is an NVIDIA GPU or the build asks for
them (docs/gpu.md). Without it an artifact runs on the portable ONNX bodies of its operators. These compute the same
integers, and the same floats up to rounding, but more slowly.
"""

from __future__ import annotations

import ctypes
import os
from importlib import resources
from pathlib import Path

from ..io.errors import DiffbitError

NAMES = ("libdiffbit_ops.so", "libdiffbit_ops.dylib", "diffbit_ops.dll")
OVERRIDE = "DIFFBIT_LIBRARY"  # environment variable: another build of it, for tests and measurements
ISA = "DIFFBIT_ISA"  # environment variable that the library reads: the instruction set to use


def library() -> Path | None:
    """Return the path of the library; None where the package was installed without it. Raises DiffbitError for a wrong
    DIFFBIT_LIBRARY."""
    if override := os.environ.get(OVERRIDE):
        if not Path(override).is_file():
            raise DiffbitError(f"{OVERRIDE} is {override}, but there is no such file")
        return Path(override)
    for name in NAMES:
        # Not beside __file__: in an editable installation the library lies in site-packages, the module elsewhere
        resource = resources.files(__package__) / name
        if resource.is_file():
            with resources.as_file(resource) as path:
                return path
    return None


def instruction_sets() -> list[str]:
    """Return the instruction sets that the library can use on this CPU, best first ("avx512vnni", "avx2", ...,
    "scalar"); [] without a library."""
    return _words(library(), "diffbit_isas")


def best_instruction_set() -> str:
    """Return the instruction set that the library's kernels use; "" without a library."""
    return os.environ.get(ISA) or next(iter(instruction_sets()), "")


def library_for(device: str) -> Path | None:
    """Return the library; None if it has no kernels for the device."""
    return library() if device == "cpu" or (device == "cuda" and cuda_architectures()) else None


def cuda_architectures(path: Path | None = None) -> list[str]:
    """Return GPU architectures that the library (at `path`) has kernels for, oldest first, such as "90a" for sm_90a;
    [] if it has none. Newer GPUs also run its kernels if the first has no letter."""
    return _words(path or library(), "diffbit_cuda_architectures")


def _words(path: Path | None, name: str) -> list[str]:
    """Return the words that a function of the library returns; [] where there is none."""
    function = getattr(ctypes.CDLL(str(path)), name, None) if path else None
    if function is None:
        return []
    function.restype = ctypes.c_char_p
    return str(function().decode()).split()
