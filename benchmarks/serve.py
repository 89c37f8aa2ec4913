"""`diffbit serve` under load: requests at the same time beside the same number one after the other.

    python benchmarks/serve.py --work DIR [--json FILE]        # DIR as generate.py's; 7 GB where it is new
    python benchmarks/serve.py --artifact ARTIFACT             # another model
    python benchmarks/serve.py --artifact ARTIFACT --shared 1500 --cache-memory 200MB

The model is generate.py's: a diffllama of 1.1 billion random parameters in int4_g32. A request has a prompt of PROMPT
random tokens and asks for NEW greedy ones; it goes over HTTP to a server in a process of its own. A round sends all
requests at once, from a thread each, and then others one after the other, so that no prompt is in a cache. Tokens per
second are those of the answers over the time from the first request to the last answer; `decode` leaves out the time of
the prompts, which the server tells at /metrics. Medians over ROUNDS rounds. All prompts begin with --shared equal
tokens. Memory is that of the server's process after the rounds, with pages that rows share counted once (Linux: Pss).
At the end the first round's requests are sent again, one after the other: each answer must be what it was among others.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from generate import prepare
from machine import describe
from report import say, write_json
from synthetic import ONE_BILLION

from diffbit.runtime import Artifact

PROMPT, NEW, ROUNDS = 128, 64, 3
Prompt = list[int]


@dataclass(frozen=True)
class Client:
    url: str

    def complete(self, prompt: Prompt, new: int) -> str:
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            response = json.load(answer)
        assert response["usage"]["completion_tokens"] == new, response
        return str(response["choices"][0]["text"])

    def total(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"diffbit_{name}"))

    def timed(self, prompts: list[Prompt], new: int, at_once: int) -> tuple[list[str], float, float]:
        """The answers, the seconds that all took, and those of the prompts."""
        before, begin = self.total("prompt_seconds"), time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda prompt: self.complete(prompt, new), prompts))
        return answers, time.perf_counter() - begin, self.total("prompt_seconds") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a folder for the model")
    parser.add_argument("--artifact", type=Path, help="a model to measure in the place of random weights")
    parser.add_argument("--requests", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with (default: none)")
    parser.add_argument("--cache-memory", metavar="SIZE", help="of the server (default: no limit)")
    parser.add_argument("--threads", type=int, help="of the server (default: its own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--quick", action="store_true", help="short requests, one round: does everything run?")
    arguments = parser.parse_args()
    if (arguments.work is None) == (arguments.artifact is None):
        parser.error("pass either --work or --artifact")
    if arguments.work:
        prepare(arguments.work, ONE_BILLION, ["int4_g32"], None)
    artifact = arguments.artifact or arguments.work / "int4_g32"
    vocabulary = Artifact.open(artifact).vocab_size
    prompt, new, rounds = (8, 4, 1) if arguments.quick else (PROMPT, NEW, ROUNDS)

    random = np.random.default_rng(0)
    shared = random.integers(3, vocabulary, arguments.shared).tolist()

    def prompts() -> list[Prompt]:
        return [shared + random.integers(3, vocabulary, prompt).tolist() for _ in range(arguments.requests)]

    command = [sys.executable, "-m", "diffbit", "serve", str(artifact), "--port", "0", "--json", "--quiet"]
    command += ["--rows", str(arguments.requests)]
    command += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    command += [] if arguments.cache_memory is None else ["--cache-memory", arguments.cache_memory]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        if not (line := server.stdout.readline()):
            raise SystemExit(f"`{' '.join(command)}` ended with exit code {server.wait()}")
        client = Client(json.loads(line)["url"].removesuffix("/v1"))
        client.timed(prompts(), new, arguments.requests)  # to warm up
        first, answers = [], []
        times: dict[str, list[tuple[float, float]]] = {"together": [], "one by one": []}
        for turn in range(rounds):
            asked = prompts()
            got, *seconds = client.timed(asked, new, arguments.requests)
            times["together"].append((seconds[0], seconds[1]))
            _, *seconds = client.timed(prompts(), new, 1)
            times["one by one"].append((seconds[0], seconds[1]))
            if turn == 0:
                first, answers = asked, got
        memory = re.findall(r"^Pss:\s+(\d+) kB", Path(f"/proc/{server.pid}/smaps_rollup").read_text(), re.MULTILINE)
        preempted = client.total("preempted")
        again, *_ = client.timed(first, new, 1)
    finally:
        server.terminate()
        server.wait()

    count = arguments.requests * new
    result: dict[str, Any] = {"machine": describe(), "requests": arguments.requests, "prompt": prompt, "new": new}
    for name, pairs in times.items():
        result[name] = {
            "tokens_per_s": statistics.median(count / whole for whole, _ in pairs),
            "decode_tokens_per_s": statistics.median(count / (whole - prompts) for whole, prompts in pairs),
        }
    for name in ("tokens_per_s", "decode_tokens_per_s"):
        result[f"ratio_{name}"] = result["together"][name] / result["one by one"][name]
    result |= {"memory_mb": int(memory[0]) * 1024 / 1e6, "preempted": preempted}
    result["equal_answers"] = sum(a == b for a, b in zip(answers, again, strict=True))
    say(**result)
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
