"""Artifacts beside each other and beside llama.cpp: answers, size, speed and memory.

    python examples/side_by_side.py ARTIFACT ... [--gguf FILE --packages NODE_MODULES] [-o FILE.json]

Each takes its turn in every round, in a process of its own, because other work on the machine slows down all of them;
the table shows medians, and the median of each round's ratio to llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffbit
from diffbit.cli import print_table
from diffbit.progress import track
from diffbit.runtime import bench

PROMPT, NEW, ROUNDS = 128, 64, 3
PEER = "llama.cpp"


def artifact_row(path: Path, threads: int) -> dict[str, Any]:
    found = bench(path, PROMPT, NEW, 1, threads)
    return {
        "size": found["model_bytes"],
        "prefill": found["prefill_tokens_per_s"],
        "decode": found["decode_tokens_per_s"],
        "memory": found["peak_host_memory_bytes"],
        "load_s": found["load_s"],
    }


def peer_row(packages: Path, gguf: Path, threads: int, text: str, most: int) -> dict[str, Any]:
    script = Path(__file__).with_name("llama_cpp.mjs")
    command = ["node", script, packages, gguf, threads, PROMPT, NEW, text, most]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: llama.cpp failed: {done.stderr.strip()}")
    return {"size": gguf.stat().st_size, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--packages", type=Path, help="a node_modules folder with node-llama-cpp")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("-o", "--output", type=Path, help="also write everything as JSON")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {path.name: [] for path in options.artifacts}
    peer = options.gguf is not None and options.packages is not None and options.packages.is_dir()
    for _ in track(range(ROUNDS), "measuring"):
        for path in options.artifacts:
            runs[path.name].append(artifact_row(path, options.threads))
        if peer:
            found = peer_row(options.packages, options.gguf, options.threads, options.prompt, options.max_tokens)
            runs.setdefault(PEER, []).append(found)
    answers = {path.name: answer(path, options) for path in options.artifacts}
    if peer:
        answers[PEER] = runs[PEER][0]["answer"]
    rows = []
    for name, rounds in runs.items():
        row: dict[str, Any] = {"model": name, "MB": rounds[0]["size"] / 1e6}
        for figure, label in (("prefill", "prefill, tokens/s"), ("decode", "decode, tokens/s")):
            row[label] = round(statistics.median(one[figure] for one in rounds))
            if peer:
                ratios = [one[figure] / other[figure] for one, other in zip(rounds, runs[PEER], strict=True)]
                row[f"{figure} ratio"] = f"{statistics.median(ratios):.2f}"
        row["memory, MiB"] = round(statistics.median(one["memory"] for one in rounds) / (1 << 20))
        rows.append(row)
    print_table(rows, title=f"{options.threads} threads, a prompt of {PROMPT} tokens and {NEW} after it")
    for name, text in answers.items():
        print(f"\n{name}, to {options.prompt!r}:\n  {text}")
    if options.output is not None:
        options.output.write_text(json.dumps({"rows": rows, "runs": runs, "answers": answers}, indent=2) + "\n")


def answer(path: Path, options: argparse.Namespace) -> str:
    chat = diffbit.Chat(diffbit.Session(path, threads=options.threads), max_tokens=options.max_tokens)
    return chat.send(options.prompt).text


if __name__ == "__main__":
    main()
