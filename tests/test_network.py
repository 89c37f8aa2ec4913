"""Commands run without a network: a process of theirs that opens a socket of the internet is killed by the kernel."""

from __future__ import annotations

import ctypes
import platform
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SOCKET = {"x86_64": 41, "aarch64": 198}.get(platform.machine())  # the number of the system call
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux") or SOCKET is None, reason="seccomp")
ROOT = Path(__file__).parents[1]
AF_INET, AF_INET6 = 2, 10
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF
KILL, ALLOW = 0x80000000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def without_network() -> None:
    """From now on, this process and its children are killed (SIGSYS) where they ask for an IP socket. Needs no root."""
    steps = [
        (LOAD, 0, 0, 0),  # the number of the call
        (EQUAL, 0, 4, SOCKET),
        (LOAD, 0, 0, 16),  # its first argument
        (EQUAL, 1, 0, AF_INET),
        (EQUAL, 0, 1, AF_INET6),
        (RETURN, 0, 0, KILL),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), code)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


def run(code: str, *arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    start = "from tests.test_network import without_network; without_network(); "
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    command = [sys.executable, "-c", path + start + code, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_a_socket_ends_the_process(family: str) -> None:
    assert run(f"import socket; socket.socket(socket.{family})").returncode == -signal.SIGSYS
    assert run("import socket; socket.socketpair()").returncode == 0


@pytest.mark.parametrize("arguments", [("verify",), ("run", "def f(", "-n", "2")], ids=["verify", "run"])
def test_no_command_asks_for_the_network(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """In processes of their own, so that also what libraries do when they are imported is seen."""
    command, *options = arguments
    diffbit = "from diffbit.cli.app import main; main(sys.argv[1:])"
    done = run(diffbit, command, ROOT / "runtime" / "nano", *options, folder=tmp_path)
    assert done.returncode == 0, (done.returncode, done.stderr)
