"""What `pip install` makes of a machine without a C++ compiler: a package that runs, and a sentence that says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "make", "ninja", "uname"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "out", "tests", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose", "--no-index"]
    environment = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC")} | {"PATH": str(tools)}
    done = subprocess.run(
        [*command, "--wheel-dir", tmp_path / "dist", source], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "diffbit was installed without its native library" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"diffbit/evaluate/report.html.j2", "diffbit/evaluate/plots.mplstyle"} <= set(names)
    assert {"diffbit/runtime/native.py", "diffbit/cli/app.py", "diffbit/py.typed"} <= set(names)
    assert [name for name in names if name.startswith("optimum")] == ["optimum/commands/register/diffbit.py"]
    assert not [name for name in names if "diffbit_ops" in name]
