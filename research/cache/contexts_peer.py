"""llama.cpp's side of contexts.py.

    contexts_peer.py LIBRARY floats FILE OUT                the same weights as F32, so that no activation is rounded
    contexts_peer.py LIBRARY measure FILE IDS SKIP TYPE...  IDS: .npy, int32 [W, S]; TYPE: of the cache, such as q8_0

`measure` prints {TYPE: {"kl": [W], "top": [W]}}: of the tokens behind the first SKIP of a window, the mean KL in nats
from the same model with a cache of f16, and how often the top token is the same. Flash attention is on, as a low-bit
cache of values needs it. LIBRARY is the unpacked npm package @node-llama-cpp/linux-x64, as for examples/llama_cpp.py.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama_cpp

F16 = "f16"
TYPES = {F16: 1, "q4_0": 2, "q5_0": 6, "q8_0": 8}  # of enum ggml_type
ALL_F32 = 0  # of enum llama_ftype
BATCH = 512  # tokens


class Cache:
    """A model's context with a cache of one type."""

    def __init__(self, library: ctypes.CDLL, model: Any, type: str, columns: int) -> None:
        self.library, of = library, llama_cpp.ContextParams
        self.size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        options = library.llama_context_default_params()
        fields = {of.N_CTX: columns, of.N_BATCH: BATCH, of.FLASH: 1, of.THREADS: 1, of.BATCH_THREADS: 1}
        for field, value in (fields | {of.KEYS: TYPES[type], of.VALUES: TYPES[type]}).items():
            options.set(field, value)
        self.context = library.llama_init_from_model(model, options)
        if not self.context:
            raise SystemExit(f"llama.cpp has no cache of {type} for this model")

    def clear(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def log_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Append tokens [N]; return those of the next ones, fp32 [N, V]."""
        ids, ones = (ctypes.c_int32 * len(tokens))(*tokens.tolist()), np.ones(len(tokens), np.int8)
        batch = self.library.llama_batch_get_one(ids, len(tokens))
        batch.logits = ones.ctypes.data  # of all tokens
        if status := self.library.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(self.library.llama_get_logits_ith(self.context, 0), (len(tokens), self.size))
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def measure(library: ctypes.CDLL, file: str, ids: np.ndarray, skip: int, types: list[str]) -> dict[str, Any]:
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp could not load {file}")
    caches = {type: Cache(library, model, type, ids.shape[1]) for type in (F16, *types)}
    scores: dict[str, Any] = {type: {"kl": [], "top": []} for type in types}
    for window in ids:
        kl, top = (dict.fromkeys(types, 0.0) for _ in range(2))
        for cache in caches.values():
            cache.clear()
        for begin in range(0, len(window), BATCH):
            tokens, late = window[begin : begin + BATCH], slice(max(0, skip - begin), None)
            exact = caches[F16].log_probabilities(tokens)[late]
            for type in types:
                other = caches[type].log_probabilities(tokens)[late]
                kl[type] += float((np.exp(exact) * (exact - other)).sum(dtype=np.float64))
                top[type] += float((exact.argmax(-1) == other.argmax(-1)).sum())
        for type in types:
            scores[type]["kl"].append(kl[type] / (len(window) - skip))
            scores[type]["top"].append(top[type] / (len(window) - skip))
    return scores


def main() -> None:
    folder, command, file, *rest = sys.argv[1:]
    library = llama_cpp.open_library(Path(folder))
    if command == "floats":
        llama_cpp.quantize(library, file, rest[0], ALL_F32)
    else:
        ids, skip, *types = rest
        print(json.dumps(measure(library, file, np.load(ids), int(skip), types)))


if __name__ == "__main__":
    main()
