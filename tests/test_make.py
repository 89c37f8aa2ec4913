"""`make` in a clone whose pip is a script: what is installed when, in which way, and what the user reads meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# It notes its arguments and does what they say to site-packages. FAKE_PIP says what the user's pip does besides
PIP = """#!{python}
import json, os, sys, time
from pathlib import Path
root = Path(__file__).parents[2]
site = root / ".venv/lib/python3.11/site-packages"
words = sys.argv[1:]
if words[:1] == ["deploy/environment.py"]:
    os.execv({python!r}, [{python!r}, *words])
assert words[:3] == ["-m", "pip", "install"], words
with open(root / "calls", "a") as calls:
    print(json.dumps(words[3:]), file=calls)
exec(os.environ.get("FAKE_PIP", ""))
if "--editable" in words:
    print("  [1/2] Building CXX object a.o", flush=True)
    print("  [2/2] Linking CXX shared module libdiffbit_ops.so", flush=True)
    for old in site.glob("diffbit-*.dist-info/direct_url.json"):
        old.unlink()
    info = site / "diffbit-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "direct_url.json").write_text(json.dumps({{"url": root.as_uri(), "dir_info": {{"editable": True}}}}))
    (site / "diffbit/runtime").mkdir(parents=True, exist_ok=True)
    (site / "diffbit/runtime/libdiffbit_ops.so").touch()
else:
    names = [word.split(">")[0] for word in words[words.index("constraints.txt") + 1 :]]
    for name in names:
        print(f"Collecting {{name}}", flush=True)
    print("Installing collected packages:", ", ".join(names), flush=True)
    for name in names:
        (site / f"{{name}}-1.dist-info").mkdir(exist_ok=True)
"""
PROJECT = """
[build-system]
requires = ["builder>=1"]
[project]
name = "diffbit"
dependencies = ["core>=1"]
[project.optional-dependencies]
lab = ["torch>=2"]
dev = ["tester>=8"]
[tool.scikit-build]
"""


class Clone:
    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / ".venv" / "lib" / "python3.11" / "site-packages"
        shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("locks", "__pycache__"))
        for name in ("csrc/a.cpp", ".venv/bin/python", "pyproject.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        self.site.mkdir(parents=True)
        (folder / "csrc" / "a.cpp").touch()
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "constraints.txt").write_text("torch==2.13.0\n")
        (folder / ".venv" / "bin" / "python").write_text(PIP.format(python=sys.executable))
        (folder / ".venv" / "bin" / "python").chmod(0o755)

    def prepare(self, *extras: str, code: int = 0, **environment: str) -> tuple[list[list[str]], str]:
        """What pip was asked to install, and what the user read."""
        (self.folder / "calls").unlink(missing_ok=True)
        command = [sys.executable, "deploy/environment.py", *extras]
        kept = {name: value for name, value in os.environ.items() if name != "SKBUILD_CMAKE_DEFINE"}
        environment = {"PIP_NO_INDEX": "1", "CXX": sys.executable} | environment
        done = subprocess.run(command, cwd=self.folder, env=kept | environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        calls = self.folder / "calls"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else [], (
            done.stdout + done.stderr
        )


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a clone")


def packages(call: list[str]) -> list[str]:
    return [word for word in call[call.index("constraints.txt") + 1 :] if word != "cmake"]


def test_each_thing_is_installed_once(clone: Clone) -> None:
    """From nothing: packages, then the clone. Then nothing; with another extra, only its packages."""
    (first, second), said = clone.prepare("lab")
    assert packages(first) == ["core>=1", "torch>=2", "builder>=1"] and "--editable" not in first
    assert {"--editable", "--no-deps", "--no-build-isolation"} <= set(second)
    for line in ("installing packages", "installing 3 packages", "3 packages installed", "compiling the kernels",
                 "2 of 2 files compiled"):  # fmt: skip
        assert line in said
    assert clone.prepare("lab") == ([], "")
    (only,), said = clone.prepare("lab", "dev")
    assert packages(only) == ["tester>=8"] and "compiling" not in said
    assert clone.prepare("lab") == clone.prepare("lab", "dev") == ([], "")


def changed_source(clone: Clone) -> None:
    future = clone.folder.stat().st_mtime + 100
    os.utime(clone.folder / "csrc" / "a.cpp", (future, future))


def changed_command(clone: Clone) -> None:
    text = PROJECT.replace('dependencies = ["core', 'scripts = {x = "y"}\ndependencies = ["core')
    (clone.folder / "pyproject.toml").write_text(text)


def changed_pin(clone: Clone) -> None:
    (clone.folder / "constraints.txt").write_text("torch==2.14.0\n")


@pytest.mark.parametrize(
    ("change", "all_packages", "compiles"),
    [(changed_source, False, True), (changed_command, False, True), (changed_pin, True, False)],
)
def test_what_has_changed_is_installed(
    change: Callable[[Clone], None], all_packages: bool, compiles: bool, clone: Clone
) -> None:
    clone.prepare("lab", "dev")
    change(clone)
    calls, _ = clone.prepare("lab")
    assert ["--editable" in call for call in calls] == [False] * all_packages + [True] * compiles
    if all_packages:  # those of an extra that is not asked for now, too
        assert set(packages(calls[0])) == {"core>=1", "torch>=2", "builder>=1", "tester>=8"}


@pytest.mark.parametrize("editable", [False, True])
def test_another_installation_is_noticed(editable: bool, clone: Clone) -> None:
    """A copy that `pip install .` has made, or an editable installation of a clone elsewhere."""
    clone.prepare("lab")
    url = clone.folder.as_uri() if not editable else Path("/else/where").as_uri()
    direct = {"url": url, "dir_info": {"editable": True} if editable else {}}
    (clone.site / "diffbit-1.dist-info" / "direct_url.json").write_text(json.dumps(direct))
    (call,), said = clone.prepare("lab")
    assert "--editable" in call
    assert ("/else/where" in said) == editable and ("a copy of diffbit" in said) != editable
    assert clone.prepare("lab") == ([], "")


def test_without_a_compiler_a_line_says_what_that_costs(clone: Clone, tmp_path: Path) -> None:
    """CMake comes from pip then, too. With a compiler, the next `make` compiles."""
    nothing = {"CXX": "nothing", "PATH": str(tmp_path)}
    (first, second), said = clone.prepare("lab", **nothing)
    assert first[-1] == "cmake" and "--editable" in second
    assert "no C++ compiler was found" in said and "compiling" not in said
    assert clone.prepare("lab", **nothing) == ([], "")
    (call,), said = clone.prepare("lab")
    assert "--editable" in call and "compiling" in said


def test_a_failure_shows_what_pip_said(clone: Clone) -> None:
    fails = "print('ERROR: no matching distribution for torch'); sys.exit(1)"
    _, said = clone.prepare("lab", code=2, FAKE_PIP=fails)
    assert "no matching distribution for torch" in said and ".venv/install.log" in said
    assert "error: " in said.splitlines()[-1]
    assert len(clone.prepare("lab")[0]) == 2  # nothing was noted as installed


def test_silence_is_broken(clone: Clone) -> None:
    """With a tenth of a second for the time after which something is said."""
    script = clone.folder / "deploy" / "say.py"
    script.write_text(script.read_text().replace("EVERY = 8.0", "EVERY = 0.1"))
    _, said = clone.prepare("lab", FAKE_PIP="print('  Downloading torch-2.whl (191 MB)', flush=True); time.sleep(0.5)")
    assert said.count("downloading torch (191 MB)") >= 2
    command = [sys.executable, str(script), "waiting: no time", sys.executable, "-c"]
    program = "import time; print(1, end='', flush=True); time.sleep(0.5); print(2); raise SystemExit(3)"
    done = subprocess.run([*command, program], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 3 and lines[:2] == ["waiting: no time", "1"] and lines[-1] == "2"
    assert len(lines) >= 5 and all("... waiting, " in line for line in lines[2:-1])


def test_an_old_python_is_refused(clone: Clone) -> None:
    script = clone.folder / "deploy" / "environment.py"
    script.write_text(script.read_text().replace("OLDEST = (3, 11)", "OLDEST = (99, 0)"))
    _, said = clone.prepare("lab", code=2)
    assert said.count("\n") == 1 and "wanted 99.0 or later: make PYTHON=python99.0" in said


@pytest.mark.parametrize(
    ("card", "torch", "reached", "options"),
    [(False, False, True, 2), (False, False, False, 0), (True, False, True, 0), (False, True, True, 0)],
)
def test_torch_without_cuda(
    card: bool, torch: bool, reached: bool, options: int, clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux without a card, from the index of such builds if that can be reached."""
    monkeypatch.syspath_prepend(str(clone.folder / "deploy"))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    import environment  # type: ignore[import-not-found]

    def urlopen(url: str, timeout: float) -> object:
        if not reached:
            raise OSError
        return open(os.devnull)

    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if card else None)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    if torch:
        (clone.site / "torch-2.dist-info").mkdir()
    assert len(environment.torch_options()) == options


def test_a_bare_make_sets_up_everything() -> None:
    """Its first command prepares .venv with every extra that a clone can use; the last line says what comes next."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", "--dry-run"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first.endswith("deploy/environment.py cpu lab serve structured hub web")
    assert "Next: " in last and "diffbit.apps.web.build" in done.stdout
