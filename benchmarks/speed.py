"""One model in diffbit and in other engines, by turns: speed of prompts and of the tokens after them, load, memory.

    python benchmarks/speed.py ARTIFACT ... [--openvino PYTHON GGUF] [--llama FOLDER GGUF] [--ik PYTHON GGUF]
                               [--genai PYTHON MODEL] [--library OTHER.so] [--prompts 128 512 2048 8000] [--new 32]
                               [--flash] [--bfloat16] [--threads 1] [--rounds 5] [--markdown]

Each contender is a process that stays (speed_peer.py). In every round each computes one prompt of random tokens and
writes --new tokens greedily, after one prompt to warm up. The table has medians in tokens/s. llama.cpp and
ik_llama.cpp run without flash attention and with it; --flash: with it alone, since they take minutes for a long prompt
without.

PYTHON     the interpreter of an environment that has openvino-genai, ik-llama-cpp-python or onnxruntime-genai
FOLDER     llama.cpp's library (examples/llama_cpp.py)
MODEL      a folder that onnxruntime-genai's model builder has written
OTHER.so   another build of diffbit's library: the artifacts are measured with it, too
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe
from report import add_outputs, command_line, table, write_outputs

from diffbit.io.progress import track

PEER = Path(__file__).with_name("speed_peer.py")
FIRST, LAST = 100, 400  # ids of words in any vocabulary
NAMES = {"openvino": "OpenVINO GenAI", "llama": "llama.cpp", "ik": "ik_llama.cpp", "genai": "onnxruntime-genai"}
FLASH, BFLOAT16 = ", flash attention", ", bfloat16"


class Contender:
    def __init__(
        self, name: str, engine: str, model: str, threads: int, python: str, place: str, more: dict[str, str]
    ) -> None:
        self.name = name
        self.measured: dict[int, list[dict[str, float]]] = {}  # by the length of the prompt, a round each
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self.process = subprocess.Popen(
            [python, str(PEER), engine, model, str(threads), place], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True, env=os.environ | more,
        )  # fmt: skip
        self.load_s: float = self._answer()["load_s"]
        self.process.send_signal(signal.SIGSTOP)

    def run(self, ids: list[int], new: int) -> dict[str, float]:
        """Compute a prompt and tokens after it, while the others are stopped: their threads may wait by spinning."""
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"ids": ids, "new": new}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, float] = self._answer()
        self.process.send_signal(signal.SIGSTOP)
        return answer

    def _answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # engines write to stdout, too
                return json.loads(line)
        self.errors.seek(0)
        sys.exit(f"error: {self.name} ended with exit status {self.process.wait()}:\n{self.errors.read()[-2000:]}")

    def median(self, prompt: int, key: str) -> float:
        return statistics.median(row[key] for row in self.measured[prompt])


def contenders(options: argparse.Namespace) -> Iterator[Contender]:
    """Start them, one after the other."""
    hows = (FLASH,) if options.flash else ("", FLASH)
    for path in options.artifacts:
        for how in ("", BFLOAT16) if options.bfloat16 else ("",):
            yield Contender(path.name + how, "diffbit" + how, str(path), options.threads, sys.executable, "", {})
        if options.library:
            name, library = path.name + ", the other library", {"DIFFBIT_LIBRARY": options.library}
            yield Contender(name, "diffbit", str(path), options.threads, sys.executable, "", library)
    for engine, name in NAMES.items():
        if given := getattr(options, engine):
            place, model = given
            python = sys.executable if engine == "llama" else place
            for how in hows if engine in ("llama", "ik") else ("",):
                label = f"{name} {Path(model).name}{how}"
                yield Contender(label, engine + how, model, options.threads, python, place, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--llama", nargs=2, metavar=("FOLDER", "GGUF"))
    parser.add_argument("--ik", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--genai", nargs=2, metavar=("PYTHON", "MODEL"))
    parser.add_argument("--flash", action="store_true", help="llama.cpp and ik_llama.cpp with flash attention alone")
    parser.add_argument("--bfloat16", action="store_true", help="the artifacts also in bfloat16")
    parser.add_argument("--library", default="", help="another build of libdiffbit_ops.so")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--new", type=int, default=32, help="tokens after each prompt, at least 2 (default: 32)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    add_outputs(parser, "research/cpu/README.md")
    options = parser.parse_args()
    if options.new < 2:
        parser.error(f"argument --new: {options.new} is less than 2")
    running: list[Contender] = []
    try:
        for contender in contenders(options):
            running.append(contender)
        measure(running, options)
    finally:
        for contender in running:
            contender.process.kill()
    text = shown(running, options)
    print(text)
    numbers = {contender.name: {"load_s": contender.load_s, "measured": contender.measured} for contender in running}
    write_outputs(options, numbers, {"speed": text + "\n"})


def measure(running: list[Contender], options: argparse.Namespace) -> None:
    random = np.random.default_rng(0)
    for contender in running:
        contender.run(random.integers(FIRST, LAST, options.prompts[0]).tolist(), options.new)
    turns = [(prompt, turn) for prompt in options.prompts for turn in range(options.rounds)]
    for prompt, _ in track(turns, "measuring"):
        ids = random.integers(FIRST, LAST, prompt).tolist()
        for contender in running:
            contender.measured.setdefault(prompt, []).append(contender.run(ids, options.new))


def shown(running: list[Contender], options: argparse.Namespace) -> str:
    """The tables of a run: speeds, load and memory of each contender."""

    def speeds(contender: Contender) -> list[float]:
        decoded = [(options.new - 1) / contender.median(prompt, "decode_s") for prompt in options.prompts]
        return [prompt / contender.median(prompt, "prefill_s") for prompt in options.prompts] + decoded

    ours, lines = speeds(running[0]), []
    for contender in running:
        own = speeds(contender)
        peaks = [contender.median(prompt, "peak_mib") for prompt in (options.prompts[0], options.prompts[-1])]
        rest = [f"{contender.load_s:.2f} s", " / ".join(f"{peak:.0f} MiB" for peak in dict.fromkeys(peaks))]
        cells = [f"{speed:.{0 if speed >= 100 else 1}f}" for speed in own]
        if contender is not running[0]:
            cells = [f"{cell} ({we / it:.2f}×)" for cell, we, it in zip(cells, ours, own, strict=True)]
        lines.append([contender.name, *cells, *rest])
    lengths = ", ".join(map(str, options.prompts))
    head = f"{describe()}. {options.threads} thread{'s' * (options.threads > 1)}, prompts of {lengths} tokens, "
    head += f"{options.new} tokens after each, tokens/s; in parentheses: how many times as fast {running[0].name} is. "
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    head += f"`{command_line(__file__, words)}`"
    titles = [f"{what} {prompt}" for what in ("prompt", "after") for prompt in options.prompts]
    return f"{head}\n\n" + table(["", *titles, "load", "peak memory"], lines)


if __name__ == "__main__":
    main()
