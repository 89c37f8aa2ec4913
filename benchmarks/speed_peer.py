"""One engine with one model, in a process that stays: speed.py starts it and asks it for prompts.

    speed_peer.py ENGINE MODEL THREADS PLACE     ENGINE: a key of ENGINES; PLACE: llama.cpp's folder

Writes a line of JSON once the model is loaded. Then it reads lines of JSON, the ids of a prompt and the number of
tokens to write, and answers each with the seconds of the prompt and of the tokens after its first, and the peak memory.
Needs numpy and the engine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 8192  # tokens
AT_ONCE = 512  # tokens of a prompt that llama.cpp and ik_llama.cpp compute at a time
Seconds = tuple[float, float]  # of a prompt with the first token, of the other tokens
Generate = Callable[[list[int], int], Seconds]


def greedy(prompt: Callable[[list[int]], int], step: Callable[[int], int]) -> Generate:
    """Time an engine that computes `prompt`, then one token after the other; each returns the most likely next one."""

    def generate(ids: list[int], new: int) -> Seconds:
        started = time.perf_counter()
        token = prompt(ids)
        first = time.perf_counter()
        for _ in range(new - 1):
            token = step(token)
        return first - started, time.perf_counter() - first

    return generate


def diffbit(model: str, threads: int, _: str, bfloat16: bool = False) -> Generate:
    from diffbit.runtime import Session

    session = Session(model, threads=threads, bfloat16=bfloat16)

    def prompt(ids: list[int]) -> int:
        session.reset()
        return int(session.prefill([ids])[0].argmax())

    return greedy(prompt, lambda token: int(session.step([[token]])[0].argmax()))


def openvino(model: str, threads: int, _: str) -> Generate:
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(ids: list[int], new: int) -> Seconds:
        tokens = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        options = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)
        measured = pipeline.generate(inputs, options).perf_metrics
        return measured.get_ttft().mean / 1e3, measured.get_tpot().mean * (new - 1) / 1e3

    return generate


def llama(model: str, threads: int, folder: str, flash: bool = False) -> Generate:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import llama_cpp

    peer = llama_cpp.Model(llama_cpp.open_library(Path(folder)), model, threads, CONTEXT, flash)

    def prompt(ids: list[int]) -> int:
        peer.clear()
        return peer.next(ids)

    return greedy(prompt, lambda token: peer.next([token]))


def ik(model: str, threads: int, _: str, flash: bool = False) -> Generate:
    from ik_llama_cpp import _ctypes_api as library

    library.llama_backend_init()
    options = library.llama_model_default_params()
    options.repack_tensors = True
    loaded = library.llama_model_load_from_file(model.encode(), options)
    options = library.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, CONTEXT, AT_ONCE
    options.n_threads = options.n_threads_batch = threads
    options.flash_attn = flash
    context = library.llama_init_from_model(loaded, options)
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))
    batch = library.llama_batch_init(CONTEXT, 0, 1)
    at = 0

    def append(ids: list[int]) -> int:
        nonlocal at
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, at + i, 1, i == len(ids) - 1
            batch.seq_id[i][0] = 0
        at += len(ids)
        if library.llama_decode(context, batch):
            sys.exit("ik_llama.cpp could not compute")
        return int(np.ctypeslib.as_array(library.llama_get_logits_ith(context, len(ids) - 1), (size,)).argmax())

    def prompt(ids: list[int]) -> int:
        nonlocal at
        library.llama_kv_cache_clear(context)
        at = 0
        return append(ids)

    return greedy(prompt, lambda token: append([token]))


def genai(model: str, threads: int, _: str) -> Generate:
    import onnxruntime_genai

    config = onnxruntime_genai.Config(model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    loaded = onnxruntime_genai.Model(config)

    def generate(ids: list[int], new: int) -> Seconds:
        options = onnxruntime_genai.GeneratorParams(loaded)
        options.set_search_options(max_length=len(ids) + new, min_length=len(ids) + new, do_sample=False)
        generator = onnxruntime_genai.Generator(loaded, options)
        started = time.perf_counter()
        generator.append_tokens(np.array(ids, np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(new - 1):
            generator.generate_next_token()
        return first - started, time.perf_counter() - first

    return generate


ENGINES: dict[str, Callable[[str, int, str], Generate]] = {
    "diffbit": diffbit,
    "diffbit, bfloat16": lambda *how: diffbit(*how, bfloat16=True),
    "openvino": openvino,
    "llama": llama,
    "llama, flash attention": lambda *how: llama(*how, flash=True),
    "ik": ik,
    "ik, flash attention": lambda *how: ik(*how, flash=True),
    "genai": genai,
}


def peak_mib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    engine, model, threads, place = sys.argv[1:]
    started = time.perf_counter()
    generate = ENGINES[engine](model, int(threads), place)

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    say(load_s=time.perf_counter() - started)
    for line in sys.stdin:
        asked = json.loads(line)
        prefill, decode = generate(asked["ids"], asked["new"])
        say(prefill_s=prefill, decode_s=decode, peak_mib=peak_mib())


if __name__ == "__main__":
    main()
