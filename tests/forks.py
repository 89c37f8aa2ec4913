"""Children of this process, by fork: what takes seconds to import is imported once, and a crash or a hang is seen."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

M_MMAP_THRESHOLD = -3  # of malloc.h
SECONDS = 600  # after which a child is ended, so that none is waited for for ever
REFUSED, RAISED = 2, 70  # exit codes: of a user's mistake; of an action that raised, with its traceback on stderr
# No other test process uses these, and they are below the ports that the system gives out, so no one takes one
# between its choice and its use
PORTS = itertools.count(10_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))


def free_port() -> int:
    """A port for children that must all be told one before any of them listens."""
    for port in PORTS:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def together(count: int, action: Callable[[], object]) -> list[int]:
    """Run it in so many processes, with the environment that torchrun gives each; their exit codes."""
    port = str(free_port())

    def run(rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        signal.alarm(SECONDS)
        action()

    children = [fork(lambda rank=rank: run(rank)) for rank in range(count)]
    return [ended(child) for child in children]


@dataclass(frozen=True)
class Done:
    """How a child ended: its exit code, or minus the signal that ended it; what it wrote to stderr and stdout."""

    code: int
    error: str
    output: str


def fork(action: Callable[[], object]) -> int:
    """Run it in a child, which ends as `Done` says; the child's number."""
    child = os.fork()
    if child:
        return child
    code = RAISED
    try:
        action()
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc(limit=-8)  # the innermost frames
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def limit_memory(memory: int) -> None:
    """From now on this process gets no more than so many bytes of address space beside those that are taken."""
    # every larger block from the system: what the heap has free would otherwise not count
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))


def run(action: Callable[[], object], *, memory: int = 0, cpu_seconds: int = 0, seconds: int = SECONDS) -> Done:
    """Run it in a child without stdin. memory: bytes of address space beside those that are taken now.

    What goes on longer than cpu_seconds is ended by SIGXCPU, longer than `seconds` by SIGALRM.
    """

    def limited() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        for descriptor, place in ((os.open(os.devnull, os.O_RDONLY), 0), (output.fileno(), 1), (error.fileno(), 2)):
            os.dup2(descriptor, place)
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115 (pytest has put others there)
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        if cpu_seconds:
            used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
            resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, used + cpu_seconds + 5))
        if memory:
            limit_memory(memory)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        action()

    with tempfile.TemporaryFile() as error, tempfile.TemporaryFile() as output:
        return Done(ended(fork(limited)), *map(_written, (error, output)))


def _written(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace")
