"""The command line: each command parses its options, calls the library and prints the result.

Results go to stdout (tables, or JSON with --json), progress and remarks to stderr. Exit codes: 0 success, 2 bad input
(or an artifact that fails `verify`), 130 interrupted, 143 terminated. A command imports the library only when it runs,
so `diffbit run` needs no torch. Commands of apps live with them (apps/NAME/command.py) and use the names below.

    app.py      the application and its commands
    options.py  options that several commands share, and the functions that read their values
    output.py   tables, JSON, remarks, errors
    train.py, quantize.py, ...  one command each, with its EXAMPLES
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from ..errors import DiffbitError, MissingDependency
from ..processes import leave, speaks
from .app import add_apps, app
from .options import Json, Overwrite, Quiet
from .output import print_error, print_json, print_table

__all__ = ["Json", "Overwrite", "Quiet", "app", "main", "print_json", "print_table"]

LAB_PACKAGES = {
    "torch", "safetensors", "onnx", "onnx_ir", "bitsandbytes", "matplotlib", "datasets", "pyarrow",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Bad input prints one sentence to stderr and exits with code 2."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:  # the first file opened for writing would get its file descriptor
        print_error("stdout is closed, so the result would be lost; redirect it to a file or to /dev/null")
        sys.exit(2)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # bytes that are not UTF-8 are reported where they are used
            stream.reconfigure(errors=errors)
    try:
        sys.exit(app(arguments, standalone_mode=False) or 0)
    except typer.TyperException as error:  # an unknown option, a missing argument, a wrong value; no message: help
        message = error.format_message().removesuffix(".").replace("Value error, ", "")
        if not message:
            sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except DiffbitError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in LAB_PACKAGES:
            raise
        message = str(MissingDependency(package, "lab", "this command"))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        reason = str(error).partition("\n")[0]
        message = (
            f"the GPU's memory does not suffice ({reason}); use shorter windows or a smaller batch, or --device cpu"
        )
    except OSError as error:
        message = f"{error.filename or 'input or output'}: failed ({error.strerror or error})"
    if speaks():
        print_error(message)
    leave()
    sys.exit(2)


add_apps()  # last, because commands of apps import the names above
