"""Errors that a user can act on.

Every room raises `DiffbitError` for bad input (a file, a tensor, an option): one sentence that says what
was found, what was wanted and what to do. The command line prints it and exits with 2; a traceback means a
defect of diffbit.
"""

from __future__ import annotations


class DiffbitError(Exception):
    """Bad input or an impossible request, told in one sentence."""


class MissingDependency(DiffbitError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'diffbit[{extra}]'")
