"""Child processes, which find their modules where this process does, but never in the current folder by accident.

`python -c` and `python -m` look there first: beside a model, a file `statistics.py` of a stranger would be run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def search_path() -> list[str]:
    """sys.path without the current folder, unless diffbit itself is imported from there (a clone): then it is last."""
    here, home = Path.cwd(), Path(__file__).absolute().parents[2]
    found = [os.path.abspath(entry) for entry in sys.path if entry]
    elsewhere = [entry for entry in found if Path(entry) != here]
    return elsewhere + [str(here)] * (here == home)


def python(module: str, function: str) -> list[str]:
    """The command that calls a module's function in a new Python."""
    code = f"import sys; sys.path[:] = {search_path()!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-I", "-c", code]


def python_script(path: Path) -> list[str]:
    """The command that runs a file, whose first argument is `search_path()` as JSON."""
    return [sys.executable, "-I", str(path), json.dumps(search_path())]
