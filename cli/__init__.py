"""The command line: each command parses options, calls a room and prints what it returns.

Results go to stdout (a table, or with --json one JSON object), progress and remarks to stderr. Exit codes: 0 done,
2 bad input (or an artifact that does not pass `verify`), 130 interrupted. Rooms are imported inside the commands, so
that `diffbit run` starts without torch.

    app.py      the application: which commands there are
    options.py  options that several commands share, and what they are turned into
    output.py   tables, JSON, remarks, errors
    train.py, quantize.py, ...  one command each, with its EXAMPLES
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from ..errors import DiffbitError, MissingDependency
from .app import app
from .output import fail

__all__ = ["app", "main"]

LAB_PACKAGES = {"torch", "safetensors", "onnx", "onnx_ir", "bitsandbytes", "matplotlib", "datasets", "pyarrow"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # bytes that are no text are told of where they are used
            stream.reconfigure(errors=errors)
    try:
        app(arguments)
    except DiffbitError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in LAB_PACKAGES:
            raise
        fail(str(MissingDependency(package, "lab", "this command")))
    except OSError as error:
        fail(f"{error.filename or 'input or output'}: failed ({error.strerror or error})")
