"""Speed and memory of an artifact on this device.

A separate process measures, so its peak memory is that of the model and not of the caller. The prompt is random tokens
(speed does not depend on them); decoding is greedy, so sampling costs one argmax.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..io.errors import DiffbitError
from ..settings import SessionOptions
from .artifact import Artifact
from .child_process import python
from .driver import Driver
from .session import Session


def bench(
    path: str | Path,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    repeats: int = 3,
    options: SessionOptions | None = None,
    *,
    memory: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Run the artifact at `path` in a new process, as a session with these options (SessionOptions, or its fields by
    name). Returns a flat dict with the arguments and

        model_bytes               size of all files on disk
        load_s                    seconds to read the files and optimize the graph
        prefill_tokens_per_s
        time_to_first_token_s     prefill of the prompt and one argmax
        decode_tokens_per_s       None for one new token
        bytes_per_token           weights and cache read for the last new token; None for an artifact without parts
        kv_bytes_per_1k_tokens    cache of one sequence
        kv_fixed_bytes            cache of one sequence that does not grow: states, a low-bit cache's residual window
        peak_host_memory_bytes    resident memory of the process, Python included; None on Windows
        peak_device_memory_bytes  only on cuda: growth of the GPU memory in use since before the model was loaded,
                                  without the CUDA context; it includes what other processes allocate meanwhile
        nodes                     {provider: {operator: count}}: where ONNX Runtime has placed the graph's nodes
        longest_context_tokens    only if `memory` (bytes) is given: the longest sequence whose cache fits into it
                                  beside the model's files, even beyond the artifact's context; None where the cache
                                  does not grow

    Times are medians over `repeats`, after one warm-up repeat. Raises DiffbitError for numbers below 1, more
    tokens than the context holds, or a measuring process that fails.
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
    how = asdict(SessionOptions.of(options, changes))
    request = json.dumps([str(path), prompt_tokens, new_tokens, repeats, how])
    done = subprocess.run(python(__name__, "_child"), input=request, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise DiffbitError(
            f"{path}: the measuring process ended without a result ({reason[0]}); check that there is enough memory"
        ) from None
    if "error" in answer:
        raise DiffbitError(answer["error"])
    fits = {} if memory is None else {"longest_context_tokens": artifact.cache.longest(memory - artifact.nbytes)}
    return dict(answer) | fits


def _child() -> None:
    try:
        print(json.dumps(_measure(*json.load(sys.stdin))))
    except DiffbitError as error:
        print(json.dumps({"error": str(error)}))


def _measure(path: str, prompt_tokens: int, new_tokens: int, repeats: int, how: dict[str, Any]) -> dict[str, Any]:
    artifact, options = Artifact.open(path), SessionOptions(**how)
    driver = None
    if options.device == "cuda":
        with contextlib.suppress(OSError, DiffbitError):  # without a driver or a GPU, opening the session says why
            driver = Driver()
    before = driver.used_memory() if driver else 0
    peak_device = 0
    started = time.perf_counter()
    session = Session(artifact, options)
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
        if driver:  # ONNX Runtime frees nothing in between, so this is the repeat's peak
            peak_device = max(peak_device, driver.used_memory() - before)
    prefill, decode = statistics.median(prefills[1:]), statistics.median(decodes[1:])
    return {
        "artifact": artifact.name,
        "device": options.device,
        "threads": options.threads,
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
        "peak_host_memory_bytes": peak_memory(),
        "nodes": session.nodes,
    } | ({"peak_device_memory_bytes": peak_device} if driver else {})


def peak_memory() -> int | None:
    """Return the peak resident bytes of this process; None on Windows."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would not do: on Linux its maximum survives exec, so a child starts with its parent's peak
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ModuleNotFoundError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere
