"""Sets up the Makefile's .venv, and says what it does and how long it takes.

    python3 deploy/environment.py EXTRA ...          # extras of pyproject.toml

It makes a virtual environment; installs the packages that pyproject.toml names for the command line and for the extras,
in the releases of constraints.txt; and installs this clone, whose kernels that compiles. Each of the three happens only
if something of it is missing or has changed since, which .venv/installed.json notes. The clone is an editable
installation: edits and `git pull` change it. It is built without isolation, in which pip's temporary environment would
make CMake compile every file again.

It needs only Python's standard library, and any Python 3 can read it, to say that it is too old.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlparse

from say import say, watch

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
NOTES = VENV / "installed.json"
OLDEST = (3, 11)
# What is said before the work begins, as measured on 2 cores (README.md)
PACKAGES, PACKAGES_TO_DEVELOP = "72 packages, 1.9 GB", "89 more packages, 1.2 GB"
COMPILE_SECONDS = 160  # of one core
# PyPI's torch for Linux brings gigabytes of CUDA, which a machine without a card has no use for
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"


def main(extras: list[str]) -> None:
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        fail(f"this is Python {sys.version.split()[0]}, wanted {wanted} or later: make PYTHON=python{wanted} ...")
    if not PYTHON.exists():
        make_environment()
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    notes = json.loads(NOTES.read_text()) if NOTES.is_file() else {}
    install_packages(project, extras, notes)
    install_clone(project, notes)


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def make_environment() -> None:
    say(f"making .venv, an environment with Python {sys.version.split()[0]}: some seconds")
    said: list[bytes] = []
    command = [sys.executable, "-m", "venv", str(VENV)]
    if watch(command, lambda piece: bool(said.append(piece)), lambda seconds: say(f"  {seconds:.0f} s so far")):
        shutil.rmtree(VENV, ignore_errors=True)
        print(b"".join(said).decode(errors="replace"), file=sys.stderr)
        fail(f"{sys.executable} cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv")


def install_packages(project: dict, extras: list[str], notes: dict) -> None:
    """Install what is missing for these extras; where constraints.txt has changed, what is there for others, too."""
    optional = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"], *(package for extra in extras for package in optional[extra])]
    needed += project["build-system"]["requires"]
    if shutil.which("cmake") is None:
        needed.append("cmake")
    constraints = hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()
    before = notes.get("packages", [])
    are_current = notes.get("constraints") == constraints
    missing = [package for package in dict.fromkeys(needed) if not (are_current and package in before)]
    if not missing:
        return
    if not are_current:
        declared = {*needed, *(package for packages in optional.values() for package in packages)}
        before = [package for package in before if package in declared]
        missing = list(dict.fromkeys([*missing, *before]))
    size = PACKAGES_TO_DEVELOP if before and are_current else PACKAGES
    if "dev" in extras and not before:
        size = f"{PACKAGES} and {PACKAGES_TO_DEVELOP}"
    say(f"installing packages into .venv ({size}): a minute or two, and the time that the download takes")
    command = ["--constraint", "constraints.txt", *torch_options(), *missing]
    if pip(command, Packages()):
        explain("the packages could not be installed")
    notes.update(packages=list(dict.fromkeys([*before, *missing])), constraints=constraints)
    NOTES.write_text(json.dumps(notes, indent=1))


def torch_options() -> list[str]:
    """pip's options for a torch without CUDA, on Linux without an NVIDIA card."""
    if sys.platform != "linux" or shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        return []
    if "PIP_NO_INDEX" in os.environ or any(site_packages().glob("torch-*.dist-info")):
        return []
    try:
        urllib.request.urlopen(f"{TORCH_WITHOUT_CUDA}/torch/", timeout=5).close()
    except (OSError, ValueError):
        say(f"  {TORCH_WITHOUT_CUDA} cannot be reached; another index's torch may bring CUDA, 3 GB")
        return []
    return ["--extra-index-url", TORCH_WITHOUT_CUDA]


def install_clone(project: dict, notes: dict) -> None:
    """Install this clone as editable, if it is not or if something has changed since: its metadata or its kernels."""
    parts = [project["project"], project["build-system"], project["tool"]["scikit-build"]]
    metadata = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    sources = max((file.stat().st_mtime for file in (ROOT / "csrc").rglob("*") if file.is_file()), default=0.0)
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    define = os.environ.get("SKBUILD_CMAKE_DEFINE", notes.get("define", ""))
    place, is_editable = origin()
    is_here = place == ROOT and is_editable
    now = {"metadata": metadata, "define": define, "compiler": compiler}
    if is_here and all(notes.get(name) == now[name] for name in now) and sources <= notes.get("compiled", 0):
        return
    if place is not None and not is_here:
        what = (
            f"an installation of {place}"
            if is_editable
            else "a copy of diffbit, which edits and `git pull` do not change"
        )
        say(f".venv has {what}: an editable installation of this clone takes its place")
    if compiler is None:
        say("no C++ compiler was found: models will run on portable operators, several times slower.")
        say("  Install one (Debian and Ubuntu: apt install g++), then run make again")
        say("installing this clone")
    else:
        cores = os.cpu_count() or 1
        say(f"compiling the kernels and installing this clone: about {COMPILE_SECONDS // cores} s on {cores} cores")
    started = time.time()
    environment = {"SKBUILD_CMAKE_DEFINE": define} if define else {}
    command = ["--verbose", "--no-deps", "--no-build-isolation", "--editable", "."]
    if pip(command, Kernels(), **environment):
        explain("this clone could not be installed")
    if compiler and not any((site_packages() / "diffbit" / "runtime").glob("*diffbit_ops.*[!h]")):
        say("the kernels could not be compiled: models will run on portable operators, several times slower")
        say(f"  {LOG.relative_to(ROOT)} says why")
    notes.update(now, compiled=started)
    NOTES.write_text(json.dumps(notes, indent=1))


def site_packages() -> Path:
    return next(VENV.glob("lib/python3*/site-packages"), VENV / "lib")


def origin() -> tuple[Path | None, bool]:
    """The folder of which .venv's diffbit was installed, and whether as editable; None: it has none. PEP 610."""
    for info in site_packages().glob("diffbit-*.dist-info"):
        file = info / "direct_url.json"
        direct = json.loads(file.read_text()) if file.is_file() else {}
        return Path(unquote(urlparse(direct.get("url", "")).path)), bool(direct.get("dir_info", {}).get("editable"))
    return None, False


class Packages:
    """What pip says while it finds, downloads and installs packages."""

    def __init__(self) -> None:
        self.found, self.total, self.before, self.now = 0, 0, 0, "looking for packages"

    def hear(self, line: str) -> None:
        if match := re.match(r"\s*(Collecting|Requirement already satisfied:) ([\w.-]+)", line):
            self.found, self.now = self.found + 1, f"looking for {match[2]}"
        elif match := re.match(r"\s*Downloading (?:\S*/)?([\w.]+)-\S+(?: \((.+)\))?", line):
            self.now = f"downloading {match[1]}" + (f" ({match[2]})" if match[2] else "")
        elif match := re.match(r"Installing collected packages: (.+)", line):
            self.total, self.before = match[1].count(",") + 1, self.count()
            say(f"  installing {self.total} packages")

    def count(self) -> int:
        return len([*site_packages().glob("*.dist-info")])

    def state(self) -> str:
        if self.total:
            return f"{max(0, min(self.count() - self.before, self.total))} of {self.total} packages installed"
        return f"{self.found} packages found, {self.now}"

    def end(self) -> str:
        return f"{self.total} packages installed" if self.total else "all packages were there"


class Kernels:
    """What CMake says while it compiles: with Ninja [37/80], with make [ 46%]."""

    def __init__(self) -> None:
        self.done = ""

    def hear(self, line: str) -> None:
        if match := re.match(r"\s*\[(?:(\d+)/(\d+)|\s*(\d+%))\]", line):
            self.done = match[3] or f"{match[1]} of {match[2]} files"

    def state(self) -> str:
        return f"{self.done} compiled" if self.done else "preparing"

    def end(self) -> str:
        return "installed" + (f", {self.done} compiled" if self.done else "")


def pip(arguments: list[str], listener: Packages | Kernels, **environment: str) -> int:
    """Run `pip install`; its output goes into the log, and what the listener makes of it to the user."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", *arguments]
    rest = b""
    started = time.monotonic()
    with open(LOG, "ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())

        def heard(piece: bytes) -> bool:
            nonlocal rest
            log.write(piece)
            log.flush()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                listener.hear(line.decode(errors="replace"))
            return False

        def silent(seconds: float) -> None:
            say(f"  {listener.state()}, {seconds:.0f} s")

        code = watch(command, heard, silent, cwd=ROOT, env={**os.environ, **environment})
    if not code:
        say(f"  {listener.end()}, {time.monotonic() - started:.0f} s")
    return code


def explain(failure: str) -> None:
    """End with the last lines of the log."""
    _, _, output = LOG.read_text(errors="replace").rpartition("\n$ ")
    print("\n".join(output.splitlines()[-20:]), file=sys.stderr)
    fail(f"{failure}; {LOG.relative_to(ROOT)} has all of pip's output")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
