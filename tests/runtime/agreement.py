"""Whether a device computes what the CPU does: a batch with padding, then steps. It imports no torch, so that a process
with another ONNX Runtime can run it:

    python -m tests.runtime.agreement openvino artifact ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Session

STEPS = 64
LENGTHS = 40, 7  # of the prompts; WebGPU has other attention kernels from 32 tokens on


def difference(artifact: Path, device: str) -> float:
    """The greatest difference of a logit from the CPU's, as a share of the spread, over greedy tokens of the CPU's.

    Raises AssertionError if it is more than twice the artifact's tolerance, as each may be off by it (a CPU rounds the
    inputs of int4 and int8 weights), or if another token is the most likely one and that leaves no doubt which is.
    """
    cpu, other = Session(artifact, threads=1), Session(artifact, device=device)
    random, golden = np.random.default_rng(0), cpu.artifact.golden
    ids = random.integers(4, cpu.artifact.vocab_size, (len(LENGTHS), max(LENGTHS)))
    mask = (np.arange(max(LENGTHS)) >= max(LENGTHS) - np.array(LENGTHS)[:, None]).astype(np.int64)  # on the left
    rows = [session.prefill(ids * mask, mask) for session in (cpu, other)]
    greatest, sure = 0.0, 0
    for step in range(STEPS + 1):
        a, b = (row.astype(np.float64) / golden.spread for row in rows)
        greatest = max(greatest, float(np.abs(a - b).max()))
        assert greatest <= 2 * golden.tolerance, f"step {step}: {greatest:.3g} of the spread"
        second, first = np.sort(a, axis=1)[:, -2:].T
        certain = first - second > 2 * golden.tolerance
        assert (a.argmax(axis=1) == b.argmax(axis=1))[certain].all(), f"step {step}: another token"
        sure += int(certain.sum())
        if step < STEPS:
            rows = [session.step(a.argmax(axis=1)[:, None]) for session in (cpu, other)]
    assert sure >= STEPS // 4, f"only {sure} tokens were compared"
    return greatest


def main(device: str, *artifacts: str) -> None:
    """Print {artifact: difference, or what is wrong}."""
    differences: dict[str, float | str] = {}
    for artifact in artifacts:
        try:
            differences[artifact] = difference(Path(artifact), device)
        except (AssertionError, DiffbitError) as error:
            differences[artifact] = str(error)
    print(json.dumps(differences))


if __name__ == "__main__":
    main(*sys.argv[1:])
