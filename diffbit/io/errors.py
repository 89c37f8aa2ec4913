"""Errors that a user can act on.

The library raises `DiffbitError` for bad input: one sentence that names the file, tensor or option, and says what was
found, what was wanted and what to do. The command line prints it and exits with code 2; a traceback is a bug.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

MOST_CHARACTERS = 2000  # of a message
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux brings gigabytes of CUDA


class DiffbitError(Exception):
    """Bad input or an impossible request, in one sentence, which is `shortened`."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shortened(sentence))


def shortened(message: str, limit: int = MOST_CHARACTERS) -> str:
    """Return a message of at most about `limit` characters: the middle of a longer one, which quotes a long name,
    number or text from a file or a request, is left out."""
    return message if len(message) <= limit else f"{message[: limit // 2]} ... {message[-limit // 2 :]}"


class MissingDependency(DiffbitError):
    """An optional package, or a part of it, is not there; the message names the extra that installs it.

    error: of the import; None: the package is not installed. The package that it names is, if it has no such module or
    no such name in it, or cannot be loaded: another release may.
    """

    def __init__(self, package: str, extra: str, purpose: str, error: ImportError | None = None) -> None:
        top = package if error is None or error.name is None else error.name.partition(".")[0]
        if error is None or (isinstance(error, ModuleNotFoundError) and find_spec(top) is None):
            name = package if top == package.partition(" ")[0] else top
            super().__init__(f"{purpose} needs {name}, which is not installed: {how_to_install(extra)}")
            return
        name, release = _release(top)
        super().__init__(
            f"{purpose} needs {name}, which is installed{release}, but cannot be used ({error}); another release may: "
            f"{_pip()} install --upgrade --force-reinstall {name}"
        )


@contextmanager
def needs(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Turn an ImportError of other packages, in the imports of a block, into a MissingDependency."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "diffbit":
            raise
        raise MissingDependency(package, extra, purpose, error) from None


def _release(module: str) -> tuple[str, str]:
    """Return the name of the package that has a module, and " as release 1.2"; the module, and nothing, if it is not
    known."""
    for name in metadata.packages_distributions().get(module, ()):
        return name, f" as release {metadata.version(name)}"
    return module, ""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra's packages, and leaves diffbit installed in the way it is.

    An editable installation stays editable: `pip install '.[serve]'` would put a copy in its place, which neither edits
    nor `git pull` change. A copy is made again of its folder. diffbit is on no package index, so that a wheel which is
    no longer there is not named; its metadata lists the extra's packages.
    """
    pip = _pip()
    options = ""
    if extra == "lab" and sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        options = f"--extra-index-url {TORCH_WITHOUT_CUDA} "
    editable, source = _source()
    if source is not None:
        return f"{pip} install {options}{'-e ' if editable else ''}'{source}[{extra}]'"
    return f"{pip} install {options}{' '.join(map(repr, _packages(extra)))}"


def _pip() -> str:
    if (path := shutil.which("pip")) is None or Path(path).parent != Path(sys.executable).parent:
        return f"{sys.executable} -m pip"  # another environment's pip would install for another Python
    return "pip"


def _source() -> tuple[bool, Path | None]:
    """Whether diffbit is installed as editable, and what it was installed from, if that is still there: a folder or a
    wheel (PEP 610). Where it is not installed, it runs in a clone."""
    try:
        direct = json.loads(metadata.distribution("diffbit").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        direct = {"url": Path(__file__).resolve().parents[2].as_uri(), "dir_info": {"editable": True}}
    url = urlparse(direct.get("url", ""))
    path = Path(unquote(url.path))
    there = (path / "pyproject.toml").is_file() if "dir_info" in direct else path.is_file()
    return bool(direct.get("dir_info", {}).get("editable")), path if url.scheme == "file" and there else None


def _packages(extra: str) -> list[str]:
    """Return an extra's packages, as diffbit's metadata names them."""
    marked = (requirement.partition(";") for requirement in metadata.requires("diffbit") or ())
    return [package.strip() for package, _, marker in marked if re.search(rf"\bextra == ['\"]{extra}['\"]", marker)]
