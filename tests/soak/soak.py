"""The server for hours under a load that changes: answers must be those of each request alone, and memory stay flat.

    python -m tests.soak.soak [MINUTES]        # prints a line a minute, and at the end what went wrong

The model is small, differential, with random weights and an int4 cache. REQUESTS requests are answered alone first:
texts, sampled and greedy, conversations, JSON schemas and tool calls, whose prompts begin alike in GROUPS groups. Then
1 to 32 clients draw from them, a minute each, whole or streamed; three in ten leave before the end. The folder of
prefixes is smaller than what they would keep, and the memory for caches than what eight rows fill.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from diffbit.apps.train.presets import model_config
from diffbit.calib_data import load_text
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.progress import set_quiet
from diffbit.models import Decoder, save
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint

REQUESTS, GROUPS, CONTEXT = 120, 12, 1024
CLIENTS = 1, 2, 4, 8, 16, 32
LEAVE, STREAMED = 0.3, 0.5  # shares of the requests
CACHE_SIZE, CACHE_BYTES = "500KB", 500_000
CACHE_MEMORY = "400KB"
GROWTH = 1.05  # of the memory of the last quarter, beside that of the second
TOKENIZER = Path(__file__).parents[2] / "examples" / "pico" / "diff_v2"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def make_artifact(folder: Path) -> Path:
    torch.manual_seed(0)
    config = replace(model_config("pico", "diff_v2"), max_position=CONTEXT)
    save(Decoder(config), folder / "float", tokenizer_from=TOKENIZER)
    (folder / "float" / "chat_template.jinja").write_text(TEMPLATE)
    scheme = Scheme(weights=parse_format("int4_g32"), attention=AttentionScheme(keys="int4", values="int4"))
    quantize_checkpoint(folder / "float", folder / "int4", scheme)
    return export_artifact(folder / "int4", folder / "model")


def make_requests() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each request."""
    text = "\n".join(load_text("stdlib", split="eval", limit=200_000).documents)
    chance, made = random.Random(0), []
    for number in range(REQUESTS):
        group = number % GROUPS
        begin = text[6000 * group :][:900]
        end = text[40_000 + 150 * number :][: chance.randrange(20, 150)]
        body: dict[str, Any] = {"max_tokens": chance.randrange(1, 48), "temperature": 0}
        if number % 5 == 0:
            made.append(("/v1/completions", body | {"prompt": begin + end}))
            continue
        if number % 5 == 1:
            sampled = {"temperature": 0.9, "top_p": 0.9, "seed": number, "presence_penalty": 0.3}
            made.append(("/v1/completions", body | sampled | {"prompt": begin + end}))
            continue
        messages = [{"role": "system", "content": begin}, {"role": "user", "content": end}]
        if number % 5 == 3:
            form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
            body |= {"response_format": form, "max_tokens": 60}
        elif number % 5 == 4:
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
        made.append(("/v1/chat/completions", body | {"messages": messages}))
    return made


@dataclass
class Load:
    """What the clients share. wrong: what was answered, and what it should have been."""

    address: str
    requests: list[tuple[str, dict[str, Any]]]
    alone: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, number: int, streamed: bool, chunks: int | None = None) -> str | None:
        """The answer; None: the server is full, or the client left after so many chunks."""
        path, body = self.requests[number]
        with closing(http.client.HTTPConnection(self.address, timeout=300)) as connection:
            said = json.dumps(body | {"stream": streamed})
            connection.request("POST", path, said, {"Content-Type": "application/json"})
            if chunks == 0:
                return None
            answer = connection.getresponse()
            if answer.status == 429:
                return None
            if answer.status != 200:
                return f"status {answer.status}: {answer.read().decode()}"
            if not streamed:
                return _said([json.loads(answer.read())], "message")
            events: list[Any] = []
            for line in answer:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                if len(events) == chunks:
                    return None
            return _said(events, "delta")

    def client(self, seed: int, until: float) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until:
            number, streamed = chance.randrange(len(self.requests)), chance.random() < STREAMED
            leaves = chance.random() < LEAVE
            try:
                got = self.ask(number, streamed or leaves, chance.randrange(6) if leaves else None)
            except (OSError, http.client.HTTPException) as error:
                got = f"{type(error).__name__}: {error}"
            what = "left or refused" if got is None else "right" if got == self.alone[number] else "wrong"
            with self.lock:
                self.counts[what] += 1
                if what == "wrong":
                    self.wrong.append(f"request {number}, streamed {streamed}: {got!r}, alone {self.alone[number]!r}")
            time.sleep(chance.random())


def _said(events: list[Any], part: str) -> str:
    """Text, tool calls and the reason of the end, of an answer whole or in pieces."""
    if wrong := [event["error"] for event in events if "error" in event]:
        return f"error {wrong}"
    text, arguments, reason = "", "", None
    for choice in (choice for event in events for choice in event["choices"]):
        spoken = choice.get(part, {})
        text += choice.get("text") or spoken.get("content") or ""
        for call in spoken.get("tool_calls") or ():
            arguments += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        reason = choice.get("finish_reason") or reason
    return f"{text}|{arguments}|{reason}"


def resident(process: int) -> float:
    """MiB, pages that rows share once."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def metric(address: str, name: str) -> float:
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"diffbit_{name}{{"))


def soak(minutes: float, folder: Path, minute: float = 60) -> list[str]:
    """Run; return what went wrong. minute: seconds for which the number of clients stays."""
    artifact, cache = make_artifact(folder), folder / "prefixes"
    command = [
        sys.executable, "-m", "diffbit", "serve", str(artifact), "--port", "0", "--json", "--quiet", "--rows", "8",
        "--queue", "16", "--threads", "1", "--reproducible", "--cache-dir", str(cache), "--cache-size", CACHE_SIZE,
        "--cache-memory", CACHE_MEMORY,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            return watched(server.pid, json.loads(server.stdout.readline())["url"], minutes, cache, minute)
        finally:
            server.terminate()


def watched(server: int, url: str, minutes: float, cache: Path, minute: float) -> list[str]:
    load = Load(url.removeprefix("http://").removesuffix("/v1"), make_requests())
    load.alone = [str(load.ask(number, streamed=False)) for number in range(REQUESTS)]
    if refused := [answer for answer in load.alone if answer.startswith("status") or answer == "None"]:
        return [f"{len(refused)} requests are refused, such as {refused[0]}"]
    chance, memory, begin = random.Random(1), [], time.monotonic()
    while (now := time.monotonic()) < begin + 60 * minutes:
        count = chance.choice(CLIENTS) if memory else max(CLIENTS)  # which take the most memory
        clients = [threading.Thread(target=load.client, args=(chance.random(), now + minute)) for _ in range(count)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        memory.append(resident(server))
        kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        print(f"{(now - begin) / 60:.0f} min, {count} clients: {dict(load.counts)}, {memory[-1]:.0f} MiB", end="")
        preempted = metric(load.address, "preempted_total")
        print(f", prefixes {kept / 1e6:.1f} MB, {preempted:.0f} answers computed again", flush=True)
    problems = load.wrong[:20] + [f"{len(load.wrong)} wrong answers"] * bool(load.wrong)
    for _ in range(60):
        if not (left := metric(load.address, "running") + metric(load.address, "waiting")):
            break
        time.sleep(1)
    problems += [f"{left:.0f} requests are still running or waiting"] * bool(left)
    quarter = max(len(memory) // 4, 1)
    before, after = statistics.median(memory[quarter : 2 * quarter] or memory), statistics.median(memory[-quarter:])
    problems += [f"memory grew from {before:.0f} to {after:.0f} MiB"] * (after > GROWTH * before)
    if kept > CACHE_BYTES:
        problems.append(f"the folder of prefixes has {kept} bytes")
    print(f"memory {before:.0f} MiB in the second quarter, {after:.0f} in the last; {problems or 'nothing went wrong'}")
    return problems


if __name__ == "__main__":
    set_quiet(True)
    with tempfile.TemporaryDirectory() as place:
        sys.exit(1 if soak(float(sys.argv[1]) if len(sys.argv) > 1 else 120, Path(place)) else 0)
