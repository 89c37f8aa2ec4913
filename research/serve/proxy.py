"""One artifact on two servers behind nginx (deploy/nginx.conf), beside one server with all threads.

    python research/serve/proxy.py --artifact ARTIFACT [--json FILE]

Rows    one server with two threads; two with one thread each, which nginx asks in turn; the same, but all requests of a
        client go to one of them (`hash`)
Load    REQUESTS requests at a time, greedy, with NEW tokens after prompts of PROMPT; then one alone; and a
        conversation, whose second turn repeats TURN tokens of the first: the seconds until its answer of one token
Rounds  all rows in turn, medians of ROUNDS. Every answer must be the same in all rows
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
from machine import describe
from report import say, table, write_json
from serve import Client

from diffbit.runtime import Artifact

REQUESTS, PROMPT, NEW, TURN, ROUNDS = 8, 128, 64, 1024, 3
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
ROWS = {"one server, 2 threads": (1, 2, False), "two, 1 thread each": (2, 1, False), "two, hash": (2, 1, True)}


@contextmanager
def server(artifact: Path, threads: int, rows: int) -> Iterator[int]:
    """The port of `diffbit serve`."""
    command = [sys.executable, "-m", "diffbit", "serve", str(artifact), "--port", "0", "--json", "--quiet"]
    command += ["--rows", str(rows), "--threads", str(threads), "--reproducible"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(json.loads(process.stdout.readline())["url"].removesuffix("/v1").rpartition(":")[2])
        finally:
            process.terminate()


@contextmanager
def nginx(ports: list[int], by_client: bool, port: int) -> Iterator[int]:
    """The port behind which the servers are."""
    text = CONFIG.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for there, here in zip((8081, 8082), ports, strict=True):
        text = text.replace(f"127.0.0.1:{there}", f"127.0.0.1:{here}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "nginx.conf")
        config.write_text(text.replace("# hash", "hash") if by_client else text)
        with subprocess.Popen(["nginx", "-p", folder, "-c", str(config)], stderr=subprocess.PIPE) as process:
            try:
                for _ in range(100):
                    try:
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                        break
                    except urllib.error.URLError:
                        time.sleep(0.1)
                yield port
            finally:
                process.terminate()


def measure(port: int, known: dict[str, str], numbers: tuple[int, ...], vocabulary: int, seed: int) -> dict[str, Any]:
    """Tokens per second together and alone, and seconds of a second turn; answers are compared with those
    of other rows, `known`."""
    requests, prompt, new, turn = numbers
    random, client = np.random.default_rng(seed), Client(f"http://127.0.0.1:{port}")

    def prompts(count: int, length: int) -> list[list[int]]:
        return [random.integers(3, vocabulary, length).tolist() for _ in range(count)]

    def checked(asked: list[list[int]], new: int, at_once: int) -> float:
        begin = time.perf_counter()
        answers, *_ = client.timed(asked, new, at_once)
        seconds = time.perf_counter() - begin
        for ids, answer in zip(asked, answers, strict=True):
            assert known.setdefault(str((ids, new)), answer) == answer, "rows give different answers"
        return seconds

    together, single = checked(prompts(requests, prompt), new, requests), checked(prompts(1, prompt), new, 1)
    first, added = prompts(1, turn)[0], prompts(1, 32)[0]
    checked([first], 1, 1)
    again = checked([first + added], 1, 1)
    return {"together": requests * new / together, "alone": new / single, "second_turn_s": again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--quick", action="store_true", help="short requests, one round: does everything run?")
    arguments = parser.parse_args()
    numbers, rounds = ((4, 8, 4, 60), 1) if arguments.quick else ((REQUESTS, PROMPT, NEW, TURN), ROUNDS)
    vocabulary = Artifact.open(arguments.artifact).vocab_size
    known: dict[str, str] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    with ExitStack() as stack:
        ports = {}
        for index, (name, (count, threads, by_client)) in enumerate(ROWS.items()):
            servers = [stack.enter_context(server(arguments.artifact, threads, numbers[0])) for _ in range(count)]
            there = servers[0] if count == 1 else stack.enter_context(nginx(servers, by_client, servers[0] + 7 + index))
            ports[name] = there
        for turn in range(rounds):
            for name, port in ports.items():
                found[name].append(measure(port, known, numbers, vocabulary, turn))
    rows = {
        name: {key: statistics.median(values[key] for values in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    say(machine=describe(), requests=numbers[0], prompt=numbers[1], new=numbers[2], turn=numbers[3])
    head = ["", f"{numbers[0]} requests, tokens/s", "one request, tokens/s", "a second turn, s"]
    cells = [
        [name, *(f"{row[key]:.3g}" for key in ("together", "alone", "second_turn_s"))] for name, row in rows.items()
    ]
    print(table(head, cells))
    if arguments.json:
        write_json(arguments.json, {"machine": describe(), "rows": rows})


if __name__ == "__main__":
    main()
