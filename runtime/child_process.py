"""Commands for child processes that import from the same paths as this process, but not from the current folder.

`python -c` and `python -m` search the current folder first. In the folder of a downloaded model, that would run a
`statistics.py` which came with the model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def search_path() -> list[str]:
    """Return sys.path without the current folder. If diffbit itself is imported from there (a clone), it comes last."""
    current, package = Path.cwd(), Path(__file__).absolute().parents[2]
    folders = [os.path.abspath(entry) for entry in sys.path if entry]
    elsewhere = [entry for entry in folders if Path(entry) != current]
    return elsewhere + [str(current)] * (current == package)


def python(module: str, function: str) -> list[str]:
    """Return the command that calls a module's function, without arguments, in a new Python process."""
    code = f"import sys; sys.path[:] = {search_path()!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-I", "-c", code]


def python_script(path: Path) -> list[str]:
    """Return the command that runs a file with `search_path()` as JSON as its first argument."""
    return [sys.executable, "-I", str(path), json.dumps(search_path())]
