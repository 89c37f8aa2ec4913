"""Other projects' kernels as contenders of kernels.py: ggml out of llama-cpp-python's wheel, and bitnet.cpp's I2_S.

Neither is a dependency, and nothing of theirs is kept here. ggml is called through ctypes in the shared libraries that
llama-cpp-python ships; bitnet.cpp's one file of kernels is compiled from a checkout of github.com/microsoft/BitNet.

A contender holds `count` weights [N, K] at addresses of their own, `run` multiplies x [M, K] by each of them once, and
`first` returns the product with the first weight, [M, N], of the last run.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
HERE = Path(__file__).parent

# ggml/include/ggml.h
GGML_F32, GGML_Q4_0, GGML_TQ2_0 = 0, 2, 35
GGML_TYPES = {"Q4_0": GGML_Q4_0, "TQ2_0": GGML_TQ2_0}


def compiled(folder: Path, name: str, sources: list[Path], *flags: str) -> ctypes.CDLL:
    """Sources built for this machine by the system's compiler and loaded."""
    compiler = os.environ.get("CXX", "c++") if sources[0].suffix == ".cpp" else os.environ.get("CC", "cc")
    library = folder / f"lib{name}.so"
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", *flags, *sources, "-o", library]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    return ctypes.CDLL(str(library))


def llama_environment(given: Path | None) -> Path | None:
    """The site-packages folder that holds llama_cpp: of the Python environment `given`, else of this one."""
    folders = sorted((given / "lib").glob("python3*/site-packages")) if given else [Path(p) for p in sys.path]
    return next((folder for folder in folders if (folder / "llama_cpp" / "lib").is_dir()), None)


class Ggml:
    """ggml's shared libraries, with the calls that a graph of matrix products needs."""

    def __init__(self, site_packages: Path) -> None:
        folder = site_packages / "llama_cpp" / "lib"
        self.version = next(site_packages.glob("llama_cpp_python-*.dist-info")).stem.split("-")[1]
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.silent = ctypes.CFUNCTYPE(None, number, ctypes.c_char_p, pointer)(lambda *_: None)
        self.base.ggml_log_set(self.silent, None)
        for library, name, result, arguments in (
            (self.base, "ggml_init", pointer, [_InitParams]),
            (self.base, "ggml_free", None, [pointer]),
            (self.base, "ggml_new_tensor_2d", pointer, [pointer, number, ctypes.c_int64, ctypes.c_int64]),
            (self.base, "ggml_mul_mat", pointer, [pointer, pointer, pointer]),
            (self.base, "ggml_new_graph_custom", pointer, [pointer, size, ctypes.c_bool]),
            (self.base, "ggml_graph_overhead_custom", size, [size, ctypes.c_bool]),
            (self.base, "ggml_tensor_overhead", size, []),
            (self.base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (self.base, "ggml_row_size", size, [number, ctypes.c_int64]),
            (self.base, "ggml_quantize_chunk", size, [number, pointer, pointer, *[ctypes.c_int64] * 3, pointer]),
            (self.base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, [pointer, pointer]),
            (self.base, "ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
            (self.base, "ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
            (self.base, "ggml_backend_graph_compute", number, [pointer, pointer]),
            (self.base, "ggml_backend_buffer_free", None, [pointer]),
            (self.base, "ggml_backend_free", None, [pointer]),
            (self.base, "ggml_backend_get_default_buffer_type", pointer, [pointer]),
            (self.base, "ggml_backend_get_device", pointer, [pointer]),
            (self.base, "ggml_backend_buft_name", ctypes.c_char_p, [pointer]),
            (self.base, "ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
            (self.cpu, "ggml_backend_cpu_reg", pointer, []),
            (self.cpu, "ggml_backend_cpu_init", pointer, []),
            (self.cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, number]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def repacking_buffer(self, backend: int) -> int | None:
        """llama.cpp's buffer type that rearranges Q4_0 while it is loaded; None where this CPU has none."""
        address = self.backend_reg_get_proc_address(self.backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
        types = listed(self.backend_get_device(backend))
        for i in range(16):
            if not types[i]:
                break
            if self.backend_buft_name(types[i]) == b"CPU_REPACK":
                return int(types[i])
        return None

    def quantize(self, kind: str, weight: Floats) -> NDArray[np.uint8]:
        """weight [N, K] in a format of ggml's, as bytes [N, row size]."""
        rows, columns = weight.shape
        packed = np.zeros((rows, self.row_size(GGML_TYPES[kind], columns)), np.uint8)
        self.quantize_chunk(GGML_TYPES[kind], weight.ctypes.data, packed.ctypes.data, 0, rows, columns, None)
        return packed


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class GgmlProducts:
    """One ggml graph of `count` products on the CPU backend; `repack`: weights in llama.cpp's repacking buffer."""

    def __init__(self, ggml: Ggml, kind: str, packed: NDArray[np.uint8], x: Floats, count: int, threads: int,
                 repack: bool = False) -> None:  # fmt: skip
        self.ggml = ggml
        # Seconds to wait after a run: GNU OpenMP's idle threads spin for some milliseconds more
        self.settle = 0.006 if threads > 1 else 0.0
        (rows, _), (tokens, columns) = packed.shape, x.shape
        self.backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        plain = ggml.backend_get_default_buffer_type(self.backend)
        buffer_type = ggml.repacking_buffer(self.backend) if repack else plain
        if buffer_type is None:
            raise LookupError("llama.cpp has no repacking buffer on this CPU")
        nodes = 2 * count + 16
        overhead = 4 * nodes * ggml.tensor_overhead() + ggml.graph_overhead_custom(nodes, False)
        self.contexts = [ggml.init(_InitParams(overhead, None, True)) for _ in range(2)]
        weights = [ggml.new_tensor_2d(self.contexts[0], GGML_TYPES[kind], columns, rows) for _ in range(count)]
        self.buffers = [ggml.backend_alloc_ctx_tensors_from_buft(self.contexts[0], buffer_type)]
        for weight in weights:
            ggml.backend_tensor_set(weight, packed.ctypes.data, 0, packed.nbytes)
        x_tensor = ggml.new_tensor_2d(self.contexts[1], GGML_F32, columns, tokens)
        products = [ggml.mul_mat(self.contexts[1], weight, x_tensor) for weight in weights]
        self.buffers.append(ggml.backend_alloc_ctx_tensors_from_buft(self.contexts[1], plain))
        x = np.ascontiguousarray(x)
        ggml.backend_tensor_set(x_tensor, x.ctypes.data, 0, x.nbytes)
        self.graph = ggml.new_graph_custom(self.contexts[1], nodes, False)
        for product in products:
            ggml.build_forward_expand(self.graph, product)
        self.product, self.shape = products[0], (tokens, rows)

    def run(self) -> None:
        if status := self.ggml.backend_graph_compute(self.backend, self.graph):
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def first(self) -> Floats:
        out = np.zeros(self.shape, np.float32)
        self.ggml.backend_tensor_get(self.product, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        for buffer in self.buffers:
            self.ggml.backend_buffer_free(buffer)
        for context in self.contexts:
            self.ggml.free(context)
        self.ggml.backend_free(self.backend)


# What ggml-bitnet-mad.cpp takes from ggml's headers
BITNET_STUBS = {
    "ggml-bitnet.h": "#pragma once\n#include <cstddef>\n#include <cstdint>\n#include <cstdlib>\n"
    "enum { GGML_TYPE_I2_S };\ninline size_t ggml_row_size(int, int64_t n) { return n; }\n",
    "ggml-quants.h": "",
    "ggml-cpu-impl.h": "",
}


class Bitnet:
    """bitnet.cpp's I2_S kernels out of a checkout of that project."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        for name, text in BITNET_STUBS.items():
            (folder / name).write_text(text)
        sources = [HERE / "bitnet_i2s.cpp", checkout / "src" / "ggml-bitnet-mad.cpp"]
        library = compiled(folder, "bitnet_i2s", sources, f"-I{folder}", f"-I{checkout / 'include'}")
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.products = library.bitnet_i2s
        self.products.argtypes = [number, number, number, pointer, pointer, number, number, number, pointer]
        self.products.restype = None

    @staticmethod
    def version(checkout: Path) -> str:
        """The commit of a checkout."""
        command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    @staticmethod
    def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Codes w+1 [N, K] -> bytes [N, K/4]."""
        fields = codes.reshape(codes.shape[0], -1, 4, 32)
        packed = fields[:, :, 0] << 6 | fields[:, :, 1] << 4 | fields[:, :, 2] << 2 | fields[:, :, 3]
        return np.ascontiguousarray(packed.reshape(codes.shape[0], -1))


class BitnetProducts:
    """`count` products by one of bitnet.cpp's kernels (0, 1, 2: see bitnet_i2s.cpp)."""

    settle = 0.0  # its threads end with each run

    def __init__(self, bitnet: Bitnet, kernel: int, packed: NDArray[np.uint8], x: Floats, count: int, threads: int,
                 scale: float) -> None:  # fmt: skip
        self.bitnet, self.x, self.scale = bitnet, np.ascontiguousarray(x), scale
        (rows, width), (tokens, columns) = packed.shape, x.shape
        self.weights = np.empty((count, rows, width), np.uint8)
        self.weights[:] = packed
        self.y = np.zeros((count, tokens, rows), np.float32)
        tables = [(ctypes.c_void_p * count)(*(array[i].ctypes.data for i in range(count)))
                  for array in (self.weights, self.y)]  # fmt: skip
        self.arguments = (kernel, threads, count, tables[0], self.x.ctypes.data, tokens, rows, columns, tables[1])

    def run(self) -> None:
        self.bitnet.products(*self.arguments)

    def first(self) -> Floats:
        return self.y[0] * self.scale

    def close(self) -> None:
        pass
