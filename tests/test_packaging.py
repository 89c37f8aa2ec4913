"""What travels: the source distribution, the wheel of a machine without a C++ compiler, and that of one with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made of what git would commit."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.iterdir()
    return archive


def wheel_of(sdist: Path, folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that pip builds of it, and what pip said."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose", "--no-index"]
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "SKBUILD_CMAKE_DEFINE")}
    done = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(sdist)], env=kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.iterdir()
    return wheel, done.stdout + done.stderr


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure(sdist: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "make", "ninja", "uname"):
        if path := shutil.which(name):
            (tools / name).symlink_to(path)
    wheel, output = wheel_of(sdist, tmp_path / "dist", PATH=str(tools))
    assert "diffbit was installed without its native library" in output
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"diffbit/apps/evaluate/report.html.j2", "diffbit/io/drawing.mplstyle"} <= set(names)
    assert {"diffbit/io/page.html.j2", "diffbit/io/page.css", "diffbit/apps/show/show.js"} <= set(names)
    assert {"diffbit/runtime/native.py", "diffbit/cli/app.py", "diffbit/py.typed"} <= set(names)
    assert all(name.startswith(("diffbit/", "diffbit-")) for name in names)
    assert {"diffbit/runtime/nano/diffbit.json", "diffbit/apps/web/page/index.html"} <= set(names)
    assert not [name for name in names if "diffbit_ops" in name]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_with_a_compiler_the_artifact_inside_runs(sdist: Path, tmp_path: Path) -> None:
    """Without torch, whose import fails. What is compiled is the scalar kernels, which takes a third of the time."""
    few = [f"DIFFBIT_KNOWS_{isa}=OFF" for isa in ("amx", "avx512vnni", "avxvnni", "avx2", "neon", "i8mm")]
    wheel, _ = wheel_of(sdist, tmp_path / "dist", SKBUILD_CMAKE_DEFINE=";".join([*few, "DIFFBIT_CUDA=OFF"]))
    names = zipfile.ZipFile(wheel).namelist()
    assert {"diffbit/runtime/libdiffbit_ops.so", "diffbit/runtime/diffbit_ops.h"} <= set(names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "site" / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    kept = {name: value for name, value in os.environ.items() if name != "DIFFBIT_LIBRARY"}

    def diffbit(*arguments: str) -> str:
        # an editable installation finds its modules before sys.path is asked
        begin = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]"
        code = (
            f"{begin}; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
            "from diffbit.cli.app import main; main(sys.argv[1:])"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments], cwd=tmp_path, env=kept, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert diffbit("--library-path").strip() == str(tmp_path / "site" / "diffbit" / "runtime" / "libdiffbit_ops.so")
    assert diffbit("run", "nano", "def ", "--max-tokens", "16", "--quiet").strip()
