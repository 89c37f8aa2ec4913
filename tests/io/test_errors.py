"""The advice on how to install an extra fits the way in which diffbit is installed (PEP 610)."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from diffbit.io.errors import DiffbitError, MissingDependency, how_to_install, needs

ROOT = Path(__file__).parents[2]


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, direct_url: dict[str, object] | None) -> None:
    """Make diffbit's metadata those of a wheel with the extra `serve`, and of its origin."""
    folder.mkdir(exist_ok=True)
    requires = "Requires-Dist: numpy\nProvides-Extra: serve\nRequires-Dist: starlette>=0.40; extra == 'serve'\n"
    windows = "Requires-Dist: wind>=1 ; (sys_platform == 'win32') and extra == \"serve\"\n"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: diffbit\nVersion: 1\n{requires}{windows}")
    if direct_url is not None:
        (folder / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(folder))
    monkeypatch.setattr(metadata, "requires", lambda name: metadata.PathDistribution(folder).requires)


def arguments(extra: str) -> list[str]:
    """The advice's words after `install`."""
    words = shlex.split(how_to_install(extra))
    return words[words.index("install") + 1 :]


def test_no_message_repeats_a_long_input() -> None:
    name = "n" * 300_000
    message = str(DiffbitError(f"{name}: is wrong; copy the file again"))
    assert len(message) < 2100 and message.startswith("nnn") and message.endswith("copy the file again")
    assert str(DiffbitError("x" * 2000)) == "x" * 2000


def test_an_editable_installation_stays_editable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path / "info", {"url": ROOT.as_uri(), "dir_info": {"editable": True}})
    assert arguments("serve") == ["-e", f"{ROOT}[serve]"]
    with pytest.raises(MissingDependency, match=r"a server needs starlette, .* install -e '"):
        raise MissingDependency("starlette", "serve", "a server")


def test_error_tells_a_missing_package_from_a_missing_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def message(statement: str) -> str:
        with pytest.raises(MissingDependency) as caught, needs("pocket", "lab", "this"):
            exec(statement)
        return str(caught.value)

    assert message("import pocket").startswith("this needs pocket, which is not installed: ")
    (tmp_path / "pocket").mkdir()
    (tmp_path / "pocket" / "__init__.py").touch()
    (tmp_path / "pocket" / "deep.py").write_text("import lint_of_pockets")
    monkeypatch.syspath_prepend(str(tmp_path))
    lacks = "this needs pocket, which is installed, but cannot be used (cannot import name 'Coin' from 'pocket'"
    assert message("from pocket import Coin").startswith(lacks)
    lacks = "this needs pocket, which is installed, but cannot be used (No module named 'pocket.coins')"
    assert message("import pocket.coins").startswith(lacks)
    assert "another release may: " in message("import pocket.coins")
    assert message("import pocket.deep").startswith("this needs lint_of_pockets, which is not installed: ")
    lacks = f"this needs pytest, which is installed as release {pytest.__version__}, but cannot be used ("
    assert message("from pytest import no_such_thing").startswith(lacks)
    with pytest.raises(ImportError), needs("pocket", "lab", "this"):  # a fault of our own
        exec("from diffbit.io.errors import no_such_thing")


def test_a_copy_is_made_again_of_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    installed(monkeypatch, tmp_path / "info", {"url": clone.as_uri(), "dir_info": {}})
    assert arguments("serve") == [f"{clone}[serve]"]


def test_a_wheel_is_named_while_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "diffbit-1-py3-none-any.whl"
    wheel.touch()
    installed(monkeypatch, tmp_path / "info", {"url": wheel.as_uri(), "archive_info": {}})
    assert arguments("serve") == [f"{wheel}[serve]"]
    wheel.unlink()
    assert arguments("serve") == ["starlette>=0.40", "wind>=1"]


@pytest.mark.parametrize("gone", [None, {"url": "file:///no/clone", "dir_info": {"editable": True}}])
def test_no_package_index_is_said_to_have_diffbit(
    gone: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path / "info", gone)
    assert arguments("serve") == ["starlette>=0.40", "wind>=1"]


def test_source_that_is_not_installed_is_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert arguments("serve") == ["-e", f"{ROOT}[serve]"]


def test_torch_comes_without_cuda_where_no_card_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path / "info", {"url": ROOT.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(sys, "platform", "linux")
    for name, options in ((None, 2), ("/usr/bin/nvidia-smi", 0)):
        monkeypatch.setattr("shutil.which", lambda tool, name=name: name if tool == "nvidia-smi" else None)
        assert len(arguments("lab")) == options + 2 and len(arguments("serve")) == 2


def test_the_command_is_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/elsewhere/{tool}")
    assert how_to_install("serve").startswith(f"{sys.executable} -m pip ")
    monkeypatch.setattr("shutil.which", lambda tool: str(Path(sys.executable).with_name(tool)))
    assert how_to_install("serve").startswith("pip install ")
