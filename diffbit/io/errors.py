"""Errors that a user can act on.

The library raises `DiffbitError` for bad input: one sentence that names the file, tensor or option, and says what was
found, what was wanted and what to do. The command line prints it and exits with code 2; a traceback is a bug.
"""

from __future__ import annotations

from pathlib import Path


class DiffbitError(Exception):
    """Bad input or an impossible request, in one sentence."""


class MissingDependency(DiffbitError):
    """An optional package is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """The command that installs an extra: in a clone, or, where diffbit is not run from one, of what is installed."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]' in {clone}"
    return f"pip install 'diffbit[{extra}]'"
