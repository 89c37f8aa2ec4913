"""diffbit on Windows and macOS, as far as Linux can show it: without what those systems lack, and on stand-ins for what
they have instead."""

from __future__ import annotations

import ast
import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffbit.io import durable, files
from diffbit.runtime import child_process, render

LACKING = {
    "win32": {
        "": "fcntl resource termios tty pty pwd grp posix_ipc readline syslog",
        "os": "fork forkpty memfd_create sched_getaffinity sched_setaffinity sched_yield sysconf getuid geteuid setsid "
        "killpg setpriority posix_spawn pwrite pread pwritev preadv fchmod fchown mkfifo statvfs getloadavg wait4 "
        "O_NOFOLLOW O_CLOEXEC",
        "signal": "SIGCHLD SIGALRM SIGKILL SIGHUP SIGUSR1 SIGPIPE ITIMER_PROF ITIMER_REAL setitimer alarm",
        "socket": "AF_UNIX send_fds recv_fds SO_REUSEPORT",
        "select": "poll epoll",
        "mmap": "MADV_NOHUGEPAGE MADV_DONTNEED MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED PROT_READ PROT_WRITE",
        "time": "tzset",
    },
    "darwin": {
        "os": "memfd_create sched_getaffinity sched_setaffinity",
        "select": "epoll",
        "mmap": "MADV_NOHUGEPAGE",
    },
}
ROOMS = ("diffbit", "ops", "calib_data", "models", "formats", "quantize", "export", "runtime", "cli", "apps")
# What others import first, with all that Linux has; then the system is another, for diffbit
PROLOGUE = """
import importlib, subprocess, sys
import numpy, onnxruntime, tokenizers, llguidance, typer, rich.console, jinja2.sandbox, prompt_toolkit, uvicorn
import asyncio, concurrent.futures, multiprocessing, shutil, tempfile, urllib.request, zoneinfo
lacking, platform = {lacking!r}, {platform!r}
for module, names in lacking.items():
    for name in names.split():
        if module:
            vars(importlib.import_module(module)).pop(name, None)
        else:
            sys.modules[name] = None
sys.platform = platform
from pathlib import Path
read_text = Path.read_text
def without_proc(path, *arguments, **options):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
    return read_text(path, *arguments, **options)
Path.read_text = without_proc
"""
SPILLED = """
import tempfile, torch
from diffbit.quantize.calibration.spill import DiskTensor
rows = DiskTensor(tempfile.gettempdir(), (4, 3), torch.device("cpu"))
rows[torch.tensor([2, 0])] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
print(rows[torch.tensor([0, 2])].tolist())
"""
A_TEXT = """
from diffbit.cli.app import main
main(["run", "nano", "def ", "-n", "8", "--temperature", "0"])
"""


def elsewhere(platform: str, code: str, first: str = "") -> str:
    """What code prints in a process whose system is another; first: modules to import before."""
    prologue = first + PROLOGUE.format(lacking=LACKING[platform], platform=platform)
    done = subprocess.run([sys.executable, "-c", prologue + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_no_file_imports_at_its_top_what_windows_lacks() -> None:
    """In a function or a `try` it may."""
    lacking = set(LACKING["win32"][""].split())
    root = Path(__file__).parents[2]
    files = [file for room in ROOMS for file in (root / room).rglob("*.py")]
    assert len(files) > 200
    for file in files:
        for node in ast.parse(file.read_bytes()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not lacking & {name.partition(".")[0] for name in names}, file


@pytest.mark.parametrize("platform", LACKING)
def test_a_model_writes_what_it_writes_here(platform: str) -> None:
    here = subprocess.run([sys.executable, "-c", A_TEXT], capture_output=True, text=True, check=True).stdout
    assert len(here) > 8 and elsewhere(platform, A_TEXT) == here


@pytest.mark.parametrize("platform", LACKING)
def test_json_of_a_schema(platform: str, tmp_path: Path) -> None:
    """In this process, where a system cannot fork (runtime/constraint.py)."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}')
    arguments = ["run", "nano", "x = ", "-n", "24", "--temperature", "0", "--json-schema", str(schema)]
    text = elsewhere(platform, f"from diffbit.cli.app import main\nmain({arguments!r})\n")
    assert isinstance(json.loads(text)["a"], int)


@pytest.mark.parametrize("platform", LACKING)
def test_hidden_states_on_disk(platform: str) -> None:
    text = elsewhere(platform, SPILLED, first="import torch\n")
    assert json.loads(text) == [[4, 5, 6], [1, 2, 3]]


def test_a_template_is_rendered_on_macos(tmp_path: Path) -> None:
    """There a limit below what the system maps into each process is refused, which Python reports so."""
    code = """
import resource, runpy, sys
sys.platform = "darwin"
set_limit = resource.setrlimit
def setrlimit(name, limits):
    if name == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    set_limit(name, limits)
resource.setrlimit = setrlimit
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    script, paths = child_process.python_script(Path(render.__file__))[-2:]
    lines = '{"template": "Hello {{ name }}", "variables": {}}\n{"name": "you"}\n'
    done = subprocess.run([sys.executable, "-c", code, script, paths], input=lines, capture_output=True, text=True)
    assert done.stdout == '{"text": "Hello you"}\n', done.stderr


class Locks:
    """A stand-in for msvcrt.locking: one holder of a file's byte at a time, who locks it anew with each open file."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}  # {inode: file descriptor}

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert (mode, count, os.lseek(descriptor, 0, os.SEEK_CUR)) == (self.LK_NBLCK, 1, durable.LOCKED_BYTE)
        inode = os.fstat(descriptor).st_ino
        holder = self.holders.get(inode)
        if holder not in (None, descriptor) and os.path.exists(f"/proc/self/fd/{holder}"):
            raise PermissionError(errno.EACCES, "Permission denied")
        self.holders[inode] = descriptor


def test_locks_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "fcntl", None)
    monkeypatch.setattr(durable, "msvcrt", Locks())
    file = tmp_path / ".out.lock"
    descriptor = durable.lock(file)
    assert descriptor is not None and file.read_text() == f"{os.getpid()}\n"
    with pytest.raises(files.Busy, match=f"process {os.getpid()} is writing there"), files.locked(tmp_path / "out"):
        pass
    durable.unlock(file, descriptor)
    assert not file.exists()
    with files.locked(tmp_path / "out"):
        assert file.exists()
    assert not file.exists()


def test_a_lock_file_that_its_holder_removes_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment nobody may open it: the name is still taken."""

    def denied(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    file = tmp_path / ".out.lock"
    monkeypatch.setattr(durable, "fcntl", None)
    monkeypatch.setattr(durable, "msvcrt", Locks())
    with monkeypatch.context() as system:
        system.setattr(os, "open", denied)
        assert durable.lock(file) is None, "a folder where nothing may be written: later steps say so"
    file.touch()
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(BlockingIOError):
        durable.lock(file)


def test_a_holder_that_ends_while_its_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    (tmp_path / ".out.lock").touch()
    monkeypatch.setattr(durable, "lock", lambda file: (_ for _ in ()).throw(BlockingIOError))
    monkeypatch.setattr(Path, "read_text", gone)
    with pytest.raises(files.Busy, match="another process is writing there"), files.locked(tmp_path / "out"):
        pass


def test_an_exchange_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def renamex_np(*arguments: object) -> int:
        called.append(arguments)
        return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(renamex_np=renamex_np))
    assert durable.exchange(tmp_path / "a", tmp_path / "b")
    assert called == [(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "b"), 2)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(renamex_np=lambda *arguments: -1))
    assert not durable.exchange(tmp_path / "a", tmp_path / "b")


def test_a_sync_on_macos_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    macos = SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda descriptor, what: called.append(what))
    monkeypatch.setattr(durable, "fcntl", macos)
    durable.sync(tmp_path)
    assert called == [51]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOTTY, errno.EIO])
def test_a_sync_on_macos_where_the_file_system_has_none(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network drive, for example, takes fsync alone. An error of the disk is not passed over."""

    def refused(descriptor: int, what: int) -> None:
        raise OSError(number, os.strerror(number))

    synced = []
    monkeypatch.setattr(durable, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=refused))
    monkeypatch.setattr(os, "fsync", synced.append)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            durable.sync(Path(__file__))
    else:
        durable.sync(Path(__file__))
    assert len(synced) == (number != errno.EIO)
