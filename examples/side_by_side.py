"""Artifacts beside each other and beside llama.cpp: answers, size, speed and memory.

    python examples/side_by_side.py ARTIFACT ... [--gguf FILE ... --llama FOLDER] [-o FILE.json]

Each takes its turn in every round, in a process of its own, because other work on the machine slows down all of them;
the table shows medians, and the median of each round's ratio to the last GGUF file. FOLDER has llama.cpp's library
(llama_cpp.py).
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
from diffbit.io.progress import track
from diffbit.runtime import bench

PROMPT, NEW, ROUNDS = 128, 64, 3


def artifact_row(path: Path, threads: int) -> dict[str, Any]:
    measured = bench(path, PROMPT, NEW, 3, threads=threads)
    return {
        "size": measured["model_bytes"],
        "prefill": measured["prefill_tokens_per_s"],
        "decode": measured["decode_tokens_per_s"],
        "memory": measured["peak_host_memory_bytes"],
        "load_s": measured["load_s"],
    }


def peer_row(library: Path, gguf: Path, threads: int, most: int, ids: list[int]) -> dict[str, Any]:
    script = Path(__file__).with_name("llama_cpp.py")
    command = [sys.executable, script, library, "measure", gguf, threads, PROMPT, NEW, most, *ids]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: llama.cpp failed: {done.stderr.strip()}")
    return {"size": gguf.stat().st_size, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--gguf", nargs="*", type=Path, default=[], help="the model's files for llama.cpp")
    parser.add_argument("--llama", type=Path, help="the folder with llama.cpp's library")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("-o", "--output", type=Path, help="also write everything as JSON")
    options = parser.parse_args()
    if options.gguf and options.llama is None:
        parser.error("--gguf needs --llama, the folder with llama.cpp's library")
    if len({path.name for path in options.artifacts}) < len(options.artifacts):
        parser.error("two artifacts have the same name; rename a folder")
    answers, ids = {}, []
    for path in options.artifacts:
        chat = diffbit.Chat(diffbit.Session(path, threads=options.threads), max_tokens=options.max_tokens)
        answers[path.name] = chat.send(options.prompt).text
        ids = chat.tokenizer.encode(chat.template.render(chat.messages[:-1]), add_special_tokens=False)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in track(range(ROUNDS), "measuring"):
        for path in options.artifacts:
            runs.setdefault(path.name, []).append(artifact_row(path, options.threads))
        for path in options.gguf:
            measured = peer_row(options.llama, path, options.threads, options.max_tokens, ids)
            runs.setdefault(f"llama.cpp {path.stem}", []).append(measured)
    answers |= {name: chat.tokenizer.decode(runs[name][0]["answer"]) for name in list(runs)[len(answers) :]}
    rows, last = [], list(runs.values())[-1]
    for name, rounds in runs.items():
        row: dict[str, Any] = {"model": name, "MB": rounds[0]["size"] / 1e6}
        for figure in ("prefill", "decode"):
            row[f"{figure}, tokens/s"] = round(statistics.median(one[figure] for one in rounds))
            if options.gguf:
                ratio = statistics.median(one[figure] / other[figure] for one, other in zip(rounds, last, strict=True))
                row[f"{figure}, ratio"] = round(ratio, 2)
        row["memory, MiB"] = round(statistics.median(one["memory"] for one in rounds) / (1 << 20))
        rows.append(row)
    print_table(rows, title=f"{options.threads} threads, a prompt of {PROMPT} tokens, {NEW} after it")
    for name, text in answers.items():
        print(f"\n{name}, asked {options.prompt!r}:\n  {text}")
    if options.output is not None:
        options.output.write_text(json.dumps({"rows": rows, "runs": runs, "answers": answers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
