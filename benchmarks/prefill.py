"""Prompts of several lengths in artifacts and, with the same model, in OpenVINO GenAI and llama.cpp, by turns.

    python benchmarks/prefill.py ARTIFACT ... [--openvino PYTHON FILE.gguf] [--llama FOLDER FILE.gguf]
                                 [--library OTHER.so] [--prompts 128 512 2048] [--threads 1] [--rounds 5]

Each contender is a process that stays; in every round each computes one prompt of random tokens, after one to warm up.
The table has the medians in tokens/s. PYTHON is an environment's with openvino-genai, FOLDER has llama.cpp's library
(examples/llama_cpp.py), and with --library the artifacts are measured also with another build of the native library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Prompt = list[int]
FIRST, LAST = 100, 400  # ids of words in any vocabulary


def diffbit_prompt(artifact: str, threads: int, _: str) -> Callable[[Prompt], object]:
    from diffbit.runtime import Session

    session = Session(artifact, threads=threads)

    def run(ids: Prompt) -> None:
        session.reset()
        session.prefill([ids])

    return run


def openvino_prompt(model: str, threads: int, _: str) -> Callable[[Prompt], object]:
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
    options = openvino_genai.GenerationConfig(max_new_tokens=1, ignore_eos=True)

    def run(ids: Prompt) -> None:
        tokens = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        pipeline.generate(inputs, options)

    return run


def llama_prompt(model: str, threads: int, folder: str) -> Callable[[Prompt], object]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import llama_cpp

    peer = llama_cpp.Model(llama_cpp.open_library(Path(folder)), model, threads)

    def run(ids: Prompt) -> None:
        peer.clear()
        peer.next(ids)

    return run


KINDS = {"diffbit": diffbit_prompt, "openvino": openvino_prompt, "llama": llama_prompt}


def serve(kind: str, model: str, threads: int, folder: str) -> None:
    """Compute the prompts of stdin, one a line, and write the seconds of each."""
    run = KINDS[kind](model, threads, folder)
    for line in sys.stdin:
        ids = json.loads(line)
        started = time.perf_counter()
        run(ids)
        print(time.perf_counter() - started, flush=True)


class Contender:
    def __init__(
        self, name: str, python: str, kind: str, model: Path, threads: int, folder: str = "", library: str = ""
    ):
        self.name, self.seconds = name, list[float]()
        command = [python, __file__, "--serve", kind, str(model), str(threads), folder]
        environment = os.environ | ({"DIFFBIT_LIBRARY": library} if library else {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def time(self, ids: Prompt) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{ids}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.strip().replace(".", "").replace("e-", "").isdigit():  # libraries write to stdout, too
                return float(line)
        sys.exit(f"error: {self.name} ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--library", default="", help="another build of libdiffbit_ops.so")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--llama", nargs=2, metavar=("FOLDER", "GGUF"))
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    threads, here = options.threads, sys.executable
    contenders = [Contender(path.name, here, "diffbit", path, threads) for path in options.artifacts]
    if options.library:
        for path in options.artifacts:
            name = f"{path.name}, the other library"
            contenders.append(Contender(name, here, "diffbit", path, threads, library=options.library))
    if options.openvino:
        python, gguf = options.openvino
        contenders.append(Contender(f"OpenVINO {Path(gguf).name}", python, "openvino", gguf, threads))
    if options.llama:
        folder, gguf = options.llama
        contenders.append(Contender(f"llama.cpp {Path(gguf).name}", here, "llama", gguf, threads, folder))
    random, rows = np.random.default_rng(0), {contender.name: "" for contender in contenders}
    for prompt in options.prompts:
        for turn in range(options.rounds + 1):
            ids = random.integers(FIRST, LAST, prompt).tolist()
            for contender in contenders:
                seconds = contender.time(ids)
                contender.seconds = [*contender.seconds, seconds] if turn else []
        for contender in contenders:
            rows[contender.name] += f" {prompt / statistics.median(contender.seconds):.0f} |"
    print(f"| tokens/s, {threads} thread{'s' * (threads > 1)} |", *(f"{prompt} |" for prompt in options.prompts))
    print("|---|" + "---|" * len(options.prompts))
    for name, row in rows.items():
        print(f"| {name} |{row}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main()
