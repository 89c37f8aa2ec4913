"""llama.cpp's side of side_by_side.py: its library, compiled for each kind of processor, from the npm package
@node-llama-cpp/linux-x64 (or linux-arm64) 3.22.1, called by ctypes.

    llama_cpp.py FOLDER quantize FILE OUT                               to Q4_0, for which it has its fastest kernels
    llama_cpp.py FOLDER measure FILE THREADS PROMPT NEW MOST [ID ...]   one line of JSON

FOLDER is the unpacked package. `measure` prints tokens per second of a prompt of PROMPT tokens and of NEW greedy ones
after it (medians of three, after one to warm up; without flash attention and with it, and the faster one counts), the
peak memory of the process, the time to load, and at most MOST greedy tokens after the ids.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_void_p
from pathlib import Path

import numpy as np

from diffbit.runtime.bench import peak_memory

CONTEXT, REPEATS = 2048, 3
Q4_0 = 2  # of enum llama_ftype


class Fields(ctypes.Structure):
    """llama.h's parameters as bytes; 32-bit fields are set by their offset in this release."""

    def set(self, offset: int, value: int) -> None:
        ctypes.memmove(ctypes.addressof(self) + offset, value.to_bytes(4, "little", signed=True), 4)


class ModelParams(Fields):
    _fields_ = [("bytes", ctypes.c_uint64 * 10)]


class ContextParams(Fields):
    _fields_ = [("bytes", ctypes.c_uint64 * 20)]
    N_CTX, N_BATCH, N_OUTPUTS, THREADS, BATCH_THREADS, FLASH, KEYS, VALUES = 0, 4, 20, 28, 32, 52, 104, 108


class QuantizeParams(Fields):
    _fields_ = [("bytes", ctypes.c_uint64 * 8)]
    FTYPE, REQUANTIZE = 4, 16


class Batch(ctypes.Structure):
    _fields_ = [("count", c_int32), *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq", "seq", "logits"))]


def open_library(folder: Path) -> ctypes.CDLL:
    (place,) = (path.parent for path in folder.glob("bins/*/libggml-base.so"))
    for pattern in ("libggml-base.so*", "libggml.*so*", "libllama.*so*"):
        library = ctypes.CDLL(str(next(place.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
        if pattern.startswith("libggml."):
            library.ggml_backend_load_all_from_path(str(place).encode())
    library.llama_log_set(QUIET, None)
    signatures = {
        "model_default_params": (ModelParams, []),
        "context_default_params": (ContextParams, []),
        "model_quantize_default_params": (QuantizeParams, []),
        "model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
        "init_from_model": (c_void_p, [c_void_p, ContextParams]),
        "model_quantize": (ctypes.c_uint32, [c_char_p, c_char_p, POINTER(QuantizeParams)]),
        "batch_get_one": (Batch, [POINTER(c_int32), c_int32]),
        "decode": (c_int32, [c_void_p, Batch]),
        "get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
        "get_memory": (c_void_p, [c_void_p]),
        "memory_clear": (None, [c_void_p, c_bool]),
        "model_get_vocab": (c_void_p, [c_void_p]),
        "vocab_n_tokens": (c_int32, [c_void_p]),
        "vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
def QUIET(level: int, text: bytes, data: object) -> None:
    pass


def quantize(library: ctypes.CDLL, source: str, out: str, type: int = Q4_0) -> None:
    options = library.llama_model_quantize_default_params()
    options.set(QuantizeParams.FTYPE, type)
    options.set(QuantizeParams.REQUANTIZE, 0x101)  # allow_requantize and quantize_output_tensor, two bools
    if code := library.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options)):
        sys.exit(f"llama.cpp could not quantize {source} ({code})")


class Model:
    def __init__(
        self, library: ctypes.CDLL, file: str, threads: int, columns: int = CONTEXT, flash: bool = False
    ) -> None:
        self.library = library
        model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        options = library.llama_context_default_params()
        for field in (ContextParams.N_CTX, ContextParams.N_BATCH):
            options.set(field, columns)
        options.set(ContextParams.FLASH, flash)
        for field in (ContextParams.THREADS, ContextParams.BATCH_THREADS):
            options.set(field, threads)
        self.context = library.llama_init_from_model(model, options)
        if not self.context:
            sys.exit(f"llama.cpp could not load {file}")
        self.vocabulary = library.llama_model_get_vocab(model)
        self.size = library.llama_vocab_n_tokens(self.vocabulary)

    def clear(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def next(self, tokens: list[int]) -> int:
        """Append tokens; return the most likely next one."""
        ids = (c_int32 * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(ids, len(tokens))):
            sys.exit("llama.cpp could not compute")
        logits = self.library.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.size,)).argmax())


def measure(library: ctypes.CDLL, file: str, threads: int, prompt: int, new: int, most: int, ids: list[int]) -> None:
    measured = {"prefill": 0.0, "decode": 0.0}
    for flash in (False, True):
        started = time.perf_counter()
        model = Model(library, file, threads, flash=flash)
        load = time.perf_counter() - started
        tokens = np.random.default_rng(0).integers(0, model.size, prompt).tolist()
        prefills, decodes = [], []
        for _ in range(REPEATS + 1):
            model.clear()
            started = time.perf_counter()
            token = model.next(tokens)
            first = time.perf_counter()
            for _ in range(new - 1):
                token = model.next([token])
            prefills.append(prompt / (first - started))
            decodes.append((new - 1) / (time.perf_counter() - first))
        for name, speeds in (("prefill", prefills), ("decode", decodes)):
            measured[name] = max(measured[name], statistics.median(speeds[1:]))
        measured.setdefault("memory", peak_memory())  # of one model
        measured.setdefault("load_s", load)
    model.clear()
    answer: list[int] = []
    token = model.next(ids) if ids else 0
    while len(answer) < most and ids and not library.llama_vocab_is_eog(model.vocabulary, token):
        answer.append(token)
        token = model.next([token])
    print(json.dumps(measured | {"answer": answer}))


if __name__ == "__main__":
    folder, command, *words = sys.argv[1:]
    opened = open_library(Path(folder))
    if command == "quantize":
        quantize(opened, *words)
    else:
        threads, prompt, new, most, *ids = map(int, words[1:])
        measure(opened, words[0], threads, prompt, new, most, ids)
