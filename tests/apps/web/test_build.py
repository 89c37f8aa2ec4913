"""The kernels for WebAssembly are compiled before a page is written; here by a compiler that writes its arguments."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffbit.apps.web import build, site
from diffbit.cli.app import app
from diffbit.export import export_artifact
from diffbit.io.errors import DiffbitError

from .test_site import fake_modules


@pytest.fixture
def clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A clone with two sources and nothing compiled."""
    wasm, sources = tmp_path / "clone" / "wasm", tmp_path / "clone" / "csrc"
    wasm.mkdir(parents=True)
    shutil.copy(site.KERNELS / "runtime.js", wasm)
    for name in ("cpu/deep/one.cpp", "wasm/two.cpp", "wasm/two.h"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).touch()
    monkeypatch.setattr(site, "KERNELS", wasm)
    monkeypatch.setattr(build, "SOURCE", sources)
    monkeypatch.setattr(build, "MODULE", wasm / "runtime.wasm")
    monkeypatch.setattr(build, "RELAXED", wasm / "runtime.relaxed.wasm")
    return tmp_path / "clone"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The arguments of each call."""
    calls: list[tuple[str, ...]] = []

    def zig(*arguments: str, output: Path) -> None:
        calls.append(arguments)
        output.write_text(" ".join(arguments))

    monkeypatch.setattr(build, "_zig", zig)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return calls


def test_what_changed_is_compiled(clone: Path, compiler: list[tuple[str, ...]]) -> None:
    build.bring_up_to_date()
    compiled = [call for call in compiler if "-c" in call]
    relaxed = [call for call in compiled if "+relaxed-simd" in call]
    assert len(compiled) == 4 and len(relaxed) == 2 and len(compiler) == 6
    assert {call[-1] for call in relaxed} == {"cpu/deep/one.cpp", "wasm/two.cpp"}
    for module in (build.MODULE, build.RELAXED):
        assert module.read_text().count(f"-{module.name}.o") == 2
    build.bring_up_to_date()
    assert len(compiler) == 6
    for changed in (build.SOURCE / "wasm" / "two.h", build.RELAXED):
        future = build.MODULE.stat().st_mtime + 10
        changed.unlink() if changed is build.RELAXED else os.utime(changed, (future, future))
        assert not build.are_current()
        build.bring_up_to_date()
        os.utime(build.SOURCE / "wasm" / "two.h", (0, 0))
        assert build.are_current()


def test_an_error_keeps_the_modules(
    clone: Path, compiler: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build()
    before = build.MODULE.read_bytes()

    def zig(*arguments: str, output: Path) -> None:
        raise DiffbitError("ziglang cannot compile")

    monkeypatch.setattr(build, "_zig", zig)
    with pytest.raises(DiffbitError, match="ziglang cannot"):
        build.build()
    assert build.MODULE.read_bytes() == before and len([*build.MODULE.parent.iterdir()]) == 3


def test_no_page_is_written_without_them(
    clone: Path,
    trained: Callable[[str], Path],
    compiler: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    artifact = export_artifact(trained("diff_v1"), tmp_path / "artifact")
    out = tmp_path / "site"
    command = ["web", str(artifact), "-o", str(out), "--packages", str(fake_modules(tmp_path / "modules"))]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for reason in (r"needs ziglang.*install .*web", "has no kernels for WebAssembly.*make build"):
        refused = CliRunner().invoke(app, command)
        assert isinstance(refused.exception, DiffbitError) and not out.exists()
        with pytest.raises(DiffbitError, match=rf"{reason}.*--slow"):
            raise refused.exception
        shutil.rmtree(build.SOURCE, ignore_errors=True)
    with pytest.raises(DiffbitError, match="no kernels for WebAssembly"):
        site.write_site(artifact, out)
    assert not out.exists() and not compiler
    assert CliRunner().invoke(app, [*command, "--slow"]).exit_code == 0
    assert {file.name for file in (out / "diffbit" / "wasm").iterdir()} == {"runtime.js"}


def test_the_first_page_compiles_them(
    clone: Path, trained: Callable[[str], Path], compiler: list[tuple[str, ...]], tmp_path: Path
) -> None:
    artifact = export_artifact(trained("diff_v1"), tmp_path / "artifact")
    packages = str(fake_modules(tmp_path / "modules"))
    done = CliRunner().invoke(app, ["web", str(artifact), "-o", str(tmp_path / "site"), "--packages", packages])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "site" / "diffbit" / "wasm" / "runtime.wasm").read_bytes() == build.MODULE.read_bytes()
    assert (tmp_path / "site" / "diffbit" / "wasm" / "runtime.relaxed.wasm").is_file()
