"""Errors that a user can act on.

The library raises `DiffbitError` for bad input: one sentence that names the file, tensor or option, and says what was
found, what was wanted and what to do. The command line prints it and exits with code 2; a traceback is a bug.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

MOST_CHARACTERS = 2000  # of a message
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux brings gigabytes of CUDA


class DiffbitError(Exception):
    """Bad input or an impossible request, in one sentence, which is `shortened`."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shortened(sentence))


def shortened(message: str, most: int = MOST_CHARACTERS) -> str:
    """Return a message of at most about `most` characters: the middle of a longer one, which quotes a long name, number
    or text from a file or a request, is left out."""
    return message if len(message) <= most else f"{message[: most // 2]} ... {message[-most // 2 :]}"


class MissingDependency(DiffbitError):
    """An optional package is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """The command that installs an extra's packages, and leaves diffbit installed in the way it is.

    An editable installation stays editable: `pip install '.[serve]'` would put a copy in its place, which neither edits
    nor `git pull` change. A copy is made again of its folder. diffbit is on no package index, so that a wheel which is
    no longer there is not named; its metadata lists the extra's packages.
    """
    pip = "pip"
    if (found := shutil.which("pip")) is None or Path(found).parent != Path(sys.executable).parent:
        pip = f"{sys.executable} -m pip"  # another environment's pip would install for another Python
    options = ""
    if extra == "lab" and sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        options = f"--extra-index-url {TORCH_WITHOUT_CUDA} "
    editable, source = _source()
    if source is not None:
        return f"{pip} install {options}{'-e ' if editable else ''}'{source}[{extra}]'"
    return f"{pip} install {options}{' '.join(map(repr, _packages(extra)))}"


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
    """An extra's packages, as diffbit's metadata names them."""
    marked = (requirement.partition(";") for requirement in metadata.requires("diffbit") or ())
    return [package.strip() for package, _, marker in marked if re.search(rf"\bextra == ['\"]{extra}['\"]", marker)]
