"""Files that installed packages add to diffbit's folders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffbit.io import plugins
from diffbit.io.errors import DiffbitError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs a package of files, with entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins.names.cache_clear()

    def do(package: str, files: tuple[str, ...], **entries: str) -> None:
        folder, metadata = tmp_path / package, tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        metadata.mkdir()
        for file in ("__init__", *files):
            (folder / f"{file}.py").write_text(f"NAME = {file!r}\n")
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = ["[diffbit.mlp]", *(f"{name} = {value}" for name, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")

    yield do
    plugins.names.cache_clear()
    for name in [name for name in sys.modules if name.startswith("theirs")]:
        del sys.modules[name]


def mlps() -> dict[str, str]:
    return plugins.names("diffbit.models.mlp")


def test_a_folder_has_its_files() -> None:
    assert mlps()["swiglu"] == "diffbit.models.mlp.swiglu"
    assert list(mlps()) == sorted(mlps())


def test_a_package_adds_a_file(install: Install) -> None:
    before = mlps()
    plugins.names.cache_clear()
    install("theirs", ("gate",), glimmer="theirs.gate")
    assert mlps() == dict(sorted({**before, "glimmer": "theirs.gate"}.items()))
    assert plugins.load("diffbit.models.mlp", "glimmer").NAME == "gate"


def test_a_package_adds_a_folder_without_its_helpers(install: Install) -> None:
    install("theirs", ("one", "two", "_helper"), any="theirs")
    added = {name: module for name, module in mlps().items() if module.startswith("theirs")}
    assert added == {"one": "theirs.one", "two": "theirs.two"}
    assert "theirs.one" not in sys.modules  # listing imports no file


def test_names_cannot_be_taken_over(install: Install) -> None:
    install("theirs", ("gate",), swiglu="theirs.gate")
    with pytest.raises(DiffbitError, match=r"adds swiglu \(theirs\.gate\) .* diffbit\.models.mlp.swiglu has that name"):
        mlps()


def test_two_packages_cannot_add_one_name(install: Install) -> None:
    install("theirs", ("gate",), glimmer="theirs.gate")
    install("theirs_too", ("gate",), glimmer="theirs_too.gate")
    with pytest.raises(DiffbitError, match="adds glimmer"):
        mlps()


def test_a_package_without_its_module_is_named(install: Install) -> None:
    install("theirs", (), glimmer="theirs.gone", other="gone.entirely")
    with pytest.raises(DiffbitError, match=r"gone\.entirely"):
        mlps()
