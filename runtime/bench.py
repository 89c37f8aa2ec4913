"""How fast and how large an artifact is on this device.

Measured in a process of its own, so that its peak memory is the model's and not the caller's. The prompt is random
tokens (speed does not depend on them), decoding is greedy without sampling cost beyond an argmax.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DiffbitError
from .artifact import Artifact
from .driver import Driver
from .session import Session


def bench(
    path: str | Path,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    repeats: int = 3,
    threads: int | None = None,
    device: str = "cpu",
    native: bool = True,
    memory: int | None = None,
) -> dict[str, Any]:
    """Run the artifact at `path` in a fresh process and return one flat row; times are medians over `repeats`.

    model_bytes (on disk), load_s (files read, graph optimized), prefill_tokens_per_s, time_to_first_token_s (the
    prompt's prefill and one argmax), decode_tokens_per_s, bytes_per_token (of weights and cache that the last new token
    reads; None for an artifact that does not say what it is made of), kv_bytes_per_1k_tokens and kv_fixed_bytes (of one
    sequence: for each 1000 tokens, and for recent ones that a low-bit cache keeps), peak_host_memory_bytes (resident,
    of the whole process, Python included), on cuda also peak_device_memory_bytes (by how much the card's memory in use
    grew since before the model was loaded: with all that ONNX Runtime keeps for itself, without the CUDA context, and
    with what other processes take meanwhile), and what was asked for. With `memory`, in bytes, also
    longest_context_tokens: the longest sequence whose cache fits into it beside the model's files (None: the cache does
    not grow), whatever context the artifact was exported for; activations and the process itself are not counted. A
    repeat that warms up comes first and is not counted.
    """
    for name, value in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens), ("repeats", repeats)):
        if value < 1:
            raise DiffbitError(f"{name} is {value}, wanted at least 1")
    artifact = Artifact.open(path)
    # The last new token is not fed back.
    if prompt_tokens + new_tokens - 1 > artifact.context_length:
        raise DiffbitError(
            f"{path}: {prompt_tokens} prompt tokens and {new_tokens} new ones do not fit the context of "
            f"{artifact.context_length}; ask for fewer"
        )
    request = json.dumps([str(path), prompt_tokens, new_tokens, repeats, threads, device, native])
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import _child; _child()"],
        input=request,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": search},
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise DiffbitError(f"{path}: the measuring process died ({reason[0]}); is there enough memory?") from None
    if "error" in answer:
        raise DiffbitError(answer["error"])
    fits = {} if memory is None else {"longest_context_tokens": artifact.cache.longest(memory - artifact.nbytes)}
    return dict(answer) | fits


def _child() -> None:
    try:
        answer = _measure(*json.load(sys.stdin))
    except DiffbitError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _measure(
    path: str, prompt_tokens: int, new_tokens: int, repeats: int, threads: int | None, device: str, native: bool
) -> dict[str, Any]:
    artifact = Artifact.open(path)
    driver = _driver() if device == "cuda" else None
    before = driver.used_memory() if driver else 0
    peak_device = 0
    started = time.perf_counter()
    session = Session(artifact, device, threads, native)
    load = time.perf_counter() - started
    prompt = np.random.default_rng(0).integers(0, artifact.vocab_size, (1, prompt_tokens))
    prefills, decodes = [], []
    for _ in range(repeats + 1):
        session.reset()
        started = time.perf_counter()
        token = int(session.prefill(prompt).argmax())
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = int(session.step([[token]]).argmax())
        prefills.append(first - started)
        decodes.append(time.perf_counter() - first)
        if driver:  # ONNX Runtime gives nothing back in between: a run's end shows its most
            peak_device = max(peak_device, driver.used_memory() - before)
    prefill, decode = statistics.median(prefills[1:]), statistics.median(decodes[1:])
    return {
        "artifact": artifact.name,
        "device": device,
        "threads": threads,
        "native": session.native,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "model_bytes": artifact.nbytes,
        "load_s": load,
        "prefill_tokens_per_s": prompt_tokens / prefill,
        "time_to_first_token_s": prefill,
        "decode_tokens_per_s": (new_tokens - 1) / decode if new_tokens > 1 else None,
        "bytes_per_token": artifact.bytes_per_token(prompt_tokens + new_tokens - 1),
        "kv_bytes_per_1k_tokens": artifact.cache.bytes_per_1k_tokens,
        "kv_fixed_bytes": artifact.cache.fixed_bytes,
        "peak_host_memory_bytes": _peak_memory(),
    } | ({"peak_device_memory_bytes": peak_device} if driver else {})


def _driver() -> Driver | None:
    """None where there is none, or no card: opening the session says so."""
    try:
        return Driver()
    except (OSError, DiffbitError):
        return None


def _peak_memory() -> int | None:
    """Peak resident bytes of this process; None where the system does not say (Windows)."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its maximum survives exec, so a child starts with its parent's peak.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ModuleNotFoundError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others kilobytes
