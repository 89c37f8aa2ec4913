"""The least address space (`ulimit -v`) in which an artifact writes 64 tokens, in steps of 32 MiB, and resident memory.

    python benchmarks/least_memory.py out/small-onnx                              # by `diffbit run`
    python benchmarks/least_memory.py out/small-onnx build/c/runtime/diffbit-c    # by libdiffbit (`make c`)

It also says how runs with less ended.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence

MIB = 1 << 20
STEP = 32 * MIB
MOST = 1 << 40  # a run that fails with so much fails for another reason
OPTIONS = ["--max-tokens", "64", "--temperature", "0"]


def run(command: Sequence[str], limit: int) -> tuple[int, int, str]:
    """Return the exit code, the peak resident bytes and the last line of stderr of a run with a limit."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=limited)
    assert process.stderr is not None
    error = process.stderr.read().decode(errors="replace").strip()
    _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, (error.splitlines() or [""])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", help="a folder that `diffbit export` wrote")
    parser.add_argument("program", nargs="?", help="diffbit-c; default: diffbit run")
    arguments = parser.parse_args()
    program = [arguments.program] if arguments.program else [sys.executable, "-m", "diffbit", "run"]
    command = [*program, arguments.artifact, "def main(", *OPTIONS, *([] if arguments.program else ["--allow-loops"])]
    failed, enough = 0, 128  # in steps
    ends: dict[tuple[int, str], int] = {}  # of runs with too little: the most that they had
    while (result := run(command, enough * STEP))[0]:
        if enough * STEP > MOST:
            raise SystemExit(f"fails with {enough * STEP // MIB} MiB, too: {result[2]}")
        ends[result[0], result[2]] = failed = enough
        enough *= 2
    while enough - failed > 1:
        middle = (failed + enough) // 2
        code, peak, error = run(command, middle * STEP)
        if code:
            ends[code, error] = failed = middle
        else:
            enough, result = middle, (code, peak, error)
    print(f"{enough * STEP // MIB} MiB of address space; {result[1] / MIB:.0f} MiB resident at most")
    for (code, error), steps in ends.items():
        print(f"with {steps * STEP // MIB} MiB: exit code {code}: {error}")


if __name__ == "__main__":
    main()
