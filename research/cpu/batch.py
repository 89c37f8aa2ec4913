"""Decoding several texts in one batch after long contexts, by format of the cache, beside llama.cpp and OpenVINO.

    python research/cpu/batch.py ARTIFACT ... [--gguf FILE --llama FOLDER --openvino PYTHON] [--markdown]

A step appends a token to each of 1, 4, 8 and 16 rows of --contexts tokens. Each artifact, and llama.cpp with each type
of its cache, takes its turn in each of --rounds rounds, in a process of its own; medians of the rounds' tokens per
second. One row is prefilled and copied to the others, before the time is taken. llama.cpp (examples/llama_cpp.py says
where FOLDER comes from) has its rows as sequences of one batch, as its server has; its float16 cache is measured with
and without flash attention, and the faster one counts; the others need it. PYTHON is the interpreter of an environment
with openvino-genai, whose continuous batching is measured (batch_peer.py). Memory is the process's with 16 rows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
from machine import describe
from report import Row, add_outputs, command_line, table, write_outputs

from diffbit.io.progress import track

COUNTS = 1, 4, 8, 16
STEPS = 16
TYPES = {"f16, no flash attention": (1, 0), "f16": (1, 1), "q8_0": (8, 1), "q4_0": (2, 1)}  # of ggml; flash attention
EXAMPLES = Path(__file__).parents[2] / "examples"


def timed(step: Callable[[int], None]) -> dict[str, float]:
    """Tokens per second of `step` with so many rows, and the memory afterwards."""
    row: dict[str, float] = {}
    for count in COUNTS:
        step(count)
        started = time.perf_counter()
        for _ in range(STEPS):
            step(count)
        row[str(count)] = count * STEPS / (time.perf_counter() - started)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return row | {"memory": pages * os.sysconf("SC_PAGE_SIZE")}


def ours(artifact: str, context: int, threads: int) -> dict[str, float]:
    from diffbit.apps.serve.rows import RowCaches
    from diffbit.runtime import Session

    session = Session(artifact, threads=threads)
    caches, random = RowCaches(session, max(COUNTS)), np.random.default_rng(0)
    for start in range(0, context, session.chunk):
        part = random.integers(0, session.artifact.vocab_size, (1, min(session.chunk, context - start)))
        caches.run(slice(0, 1), part, np.array([start]))
    for row in range(1, max(COUNTS)):
        caches.put(row, context, caches.first(0, context))
    lengths, tokens = np.full(max(COUNTS), context), np.zeros((max(COUNTS), 1), np.int64)

    def step(count: int) -> None:
        rows = slice(0, count)
        tokens[rows, 0] = caches.run(rows, tokens[rows], lengths[rows]).argmax(-1)
        lengths[rows] += 1

    return timed(step)


def llama(folder: str, file: str, kind: str, context: int, threads: int) -> dict[str, float]:
    sys.path.insert(0, str(EXAMPLES))
    import llama_cpp
    from llama_cpp import Batch, ContextParams

    library, most = llama_cpp.open_library(Path(folder)), max(COUNTS)
    library.llama_memory_seq_cp.argtypes = [ctypes.c_void_p, *4 * [ctypes.c_int32]]
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    options = library.llama_context_default_params()
    type_, flash = TYPES[kind]
    room = -(-(context + (STEPS + 1) * len(COUNTS)) // 256) * 256
    fields = {ContextParams.N_CTX: most * room, 12: most, 104: type_, 108: type_, ContextParams.FLASH: flash}
    fields |= dict.fromkeys((ContextParams.THREADS, ContextParams.BATCH_THREADS), threads)
    assert bytes(options)[104] == bytes(options)[108] == 1, "the types of the cache lie elsewhere in this release"
    for offset, value in fields.items():
        options.set(offset, value)
    state = library.llama_init_from_model(model, options)
    if not state:
        sys.exit(f"llama.cpp could not load {file}")
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def decode(tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> None:
        n = len(tokens)
        one = [(ctypes.c_int32 * 1)(row) for row in rows]
        arrays: list[Any] = [
            (ctypes.c_int32 * n)(*tokens), None, (ctypes.c_int32 * n)(*positions), (ctypes.c_int32 * n)(*[1] * n),
            (ctypes.c_void_p * n)(*map(ctypes.addressof, one)), (ctypes.c_int8 * n)(*[int(n <= most)] * n),
        ]  # fmt: skip
        pointers = [None if array is None else ctypes.addressof(array) for array in arrays]
        if library.llama_decode(state, Batch(n, *pointers)):
            sys.exit("llama.cpp could not compute")

    prompt = np.random.default_rng(0).integers(0, size, context).tolist()
    for start in range(0, context, 512):
        part = prompt[start : start + 512]
        decode(part, range(start, start + len(part)), [0] * len(part))
    for row in range(1, most):
        library.llama_memory_seq_cp(library.llama_get_memory(state), 0, row, -1, -1)
    lengths, next_tokens = [context] * most, [0] * most

    def step(count: int) -> None:
        decode(next_tokens[:count], lengths[:count], range(count))
        for row in range(count):
            logits = np.ctypeslib.as_array(library.llama_get_logits_ith(state, row), (size,))
            next_tokens[row], lengths[row] = int(logits.argmax()), lengths[row] + 1

    return timed(step)


def measured(side: str, *arguments: object) -> dict[str, float]:
    return answer([sys.executable, Path(__file__).resolve(), "--child", side, *arguments])


def answer(command: Sequence[object]) -> dict[str, float]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def best_of(rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians; of llama.cpp's float16 caches, the faster one."""
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]} for name, rounds in rows.items()
    }
    other = medians.pop("llama.cpp f16, no flash attention", None)
    if other is not None and other[str(COUNTS[-1])] > medians["llama.cpp f16"][str(COUNTS[-1])]:
        medians["llama.cpp f16"] = other
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="llama.cpp's library")
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter with openvino-genai")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for both")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8000], help="tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    add_outputs(parser, "research/cpu/README.md")
    options = parser.parse_args()
    peers = TYPES if options.llama and options.gguf else {}
    numbers: list[Row] = []
    for context in options.contexts:
        rows: dict[str, list[dict[str, float]]] = {}
        for _ in track(range(options.rounds), f"{context} tokens"):
            for path in options.artifacts:
                rows.setdefault(f"diffbit {path.name}", []).append(measured("ours", path, context, options.threads))
            for kind in peers:
                arguments = options.llama, options.gguf, kind, context, options.threads
                rows.setdefault(f"llama.cpp {kind}", []).append(measured("llama", *arguments))
            if options.openvino and options.gguf:
                peer = Path(__file__).with_name("batch_peer.py")
                command = [options.openvino, peer, options.gguf, context, options.threads, STEPS, *COUNTS]
                rows.setdefault("OpenVINO GenAI", []).append(answer(command))
        numbers += [{"context": context, "name": name, **row} for name, row in best_of(rows).items()]
    lines = [
        [row["context"], row["name"], *(f"{row[str(count)]:,.0f}" for count in COUNTS), f"{row['memory'] / 2**20:,.0f}"]
        for row in numbers
    ]
    header = ["context", "model", *(f"{n} row{'s' * (n > 1)}, tokens/s" for n in COUNTS), "memory, MiB"]
    about = f"{describe()}, {options.threads} threads. `{command_line(__file__, sys.argv[1:])}`"
    text = f"{about}\n\n{table(header, lines)}"
    print(text)
    write_outputs(options, numbers, {"batch": text})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        side, *words = sys.argv[2:]
        run: Callable[..., dict[str, float]] = {"ours": ours, "llama": llama}[side]
        print(json.dumps(run(*words[:-2], *map(int, words[-2:]))))
    else:
        main()
