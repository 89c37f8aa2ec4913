"""Says what a command of the Makefile does, and that it is still at work when it has said nothing for a while.

    python3 deploy/say.py "checking types (mypy): a minute" COMMAND [ARGUMENT ...]

The command's output is passed on. The text is empty where the command itself says what it does; on a terminal, where it
has a bar that moves, it is left alone. It needs only Python's standard library.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

EVERY = 8.0  # seconds without a word


def say(line: str) -> None:
    print(line, flush=True)


def watch(
    command: Sequence[str], heard: Callable[[bytes], bool], silent: Callable[[float], None], **options: Any
) -> int:
    """Run a command and return its exit code.

    heard: takes each piece of its output, and returns whether the user has seen something of it. silent: takes the
    seconds since the start, after EVERY seconds in which the user has seen nothing. options: those of Popen.
    """
    started = seen = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert process.stdout is not None
    try:
        while True:
            if select.select([process.stdout], [], [], 0.2)[0]:
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                if heard(piece):
                    seen = time.monotonic()
            elif process.poll() is not None:
                break  # a process that it left behind keeps the pipe open
            if time.monotonic() - seen >= EVERY:
                seen = time.monotonic()
                silent(seen - started)
        return process.wait()
    except KeyboardInterrupt:  # the command gets Ctrl-C, too
        process.wait()
        return 130


def main(label: str, command: Sequence[str]) -> int:
    if not label and sys.stdout.isatty() and sys.stderr.isatty():
        return subprocess.call(command)
    if label:
        say(label)
    line_is_open = False

    def heard(piece: bytes) -> bool:
        nonlocal line_is_open
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        line_is_open = not piece.endswith(b"\n")
        return True

    def silent(seconds: float) -> None:
        nonlocal line_is_open
        what = label.partition(":")[0]
        say("\n" * line_is_open + f"  ... {what}{', ' * bool(what)}{seconds:.0f} s so far")
        line_is_open = False

    environment = dict(os.environ)
    if sys.stdout.isatty():  # the command writes into a pipe; these make only themselves colourful, not what they start
        environment.update(PY_COLORS="1", MYPY_FORCE_COLOR="1")
    return watch(command, heard, silent, env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
