"""llama.cpp's and ik_llama.cpp's side of frontier.py.

    frontier_peer.py LIBRARY quantize FILE OUT TYPE [MATRIX]    TYPE is one of theirs, such as IQ4_XS; MATRIX: an
                                                                importance matrix, .npz: the mean square of each input
                                                                of a tensor, by the tensor's name
    frontier_peer.py LIBRARY logits FILE IDS                    IDS: .npy, int32 [W, S]; fp32 [W, S, V] go to stdout

LIBRARY is the unpacked npm package @node-llama-cpp/linux-x64, as for examples/llama_cpp.py, or `ik`: then the
interpreter is that of an environment with ik-llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
Inputs = dict[str, np.ndarray]  # mean squares, by the tensor's name
# of enum llama_ftype
# fmt: off
TYPES = {
    "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29, "IQ4_XS": 30,
}
# fmt: on


class Llama:
    def __init__(self, folder: str) -> None:
        import llama_cpp

        self.example, self.library = llama_cpp, llama_cpp.open_library(Path(folder))

    def quantize(self, file: str, out: str, kind: str, inputs: Inputs) -> int:
        class Entry(ctypes.Structure):
            _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]

        squares = {name: np.ascontiguousarray(values, np.float32) for name, values in inputs.items()}
        entries = [Entry(name.encode(), values.ctypes.data, len(values)) for name, values in squares.items()]
        matrix = (Entry * (len(entries) + 1))(*entries)  # the last one, without a name, is the end
        options = self.library.llama_model_quantize_default_params()
        for offset, value in ((0, 1), (4, TYPES[kind])):  # threads, type
            options.set(offset, value)
        if inputs:
            ctypes.memmove(ctypes.addressof(options) + 24, ctypes.addressof(matrix).to_bytes(8, "little"), 8)
        return int(self.library.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(options)))

    def logits(self, file: str, windows: np.ndarray) -> Iterator[bytes]:
        model = self.example.Model(self.library, file, 1)
        ones = np.ones(windows.shape[1], np.int8)
        for window in windows:
            model.clear()
            ids = (ctypes.c_int32 * len(window))(*window.tolist())
            batch = self.library.llama_batch_get_one(ids, len(window))
            batch.logits = ones.ctypes.data  # of all tokens
            if status := self.library.llama_decode(model.context, batch):
                raise SystemExit(f"llama_decode returned {status}")
            yield ctypes.string_at(self.library.llama_get_logits_ith(model.context, 0), 4 * len(window) * model.size)


class Ik:
    def quantize(self, file: str, out: str, kind: str, inputs: Inputs) -> int:
        from ik_llama_cpp.quantize import find_quantize_bin

        with TemporaryDirectory() as folder:
            options = []
            if inputs:
                matrix = Path(folder) / "matrix.dat"
                parts = [pack("<i", len(inputs))]
                for name, squares in inputs.items():  # name, number of calls, values
                    parts += [pack("<i", len(name)), name.encode(), pack("<ii", 1, len(squares))]
                    parts.append(squares.astype("<f4").tobytes())
                matrix.write_bytes(b"".join([*parts, pack("<ii", 1, 1), b"-"]))  # all calls; the text's name
                options = ["--imatrix", str(matrix)]
            command = [str(find_quantize_bin()), *options, file, out, kind, "1"]
            return subprocess.run(command, stdout=sys.stderr).returncode

    def logits(self, file: str, windows: np.ndarray) -> Iterator[bytes]:
        from ik_llama_cpp import _ctypes_api as library

        library.llama_backend_init()
        model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        if not model:
            raise SystemExit(f"{file}: could not be loaded")
        options = library.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = windows.shape[1]
        options.n_threads = options.n_threads_batch = 1
        options.logits_all, options.flash_attn = True, False
        context = library.llama_init_from_model(model, options)
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        batch = library.llama_batch_init(windows.shape[1], 0, 1)
        batch.n_tokens = windows.shape[1]
        for window in windows:
            library.llama_kv_cache_clear(context)
            for i, token in enumerate(window):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
                batch.seq_id[i][0] = 0
            if status := library.llama_decode(context, batch):
                raise SystemExit(f"llama_decode returned {status}")
            yield ctypes.string_at(library.llama_get_logits_ith(context, 0), 4 * len(window) * size)


def main() -> None:
    name, command, file, *rest = sys.argv[1:]
    peer: Any = Ik() if name == "ik" else Llama(name)
    if command == "quantize":
        out, kind, *matrix = rest
        inputs = dict(np.load(matrix[0])) if matrix else {}
        if status := peer.quantize(file, out, kind, inputs):
            raise SystemExit(f"{file}: could not be quantized to {kind} (status {status})")
    else:
        for values in peer.logits(file, np.load(rest[0])):
            sys.stdout.buffer.write(values)


if __name__ == "__main__":
    main()
