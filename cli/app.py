"""The application: its commands, in the order in which --help lists them."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

from ..io import plugins
from ..io.errors import DiffbitError, MissingDependency
from ..io.hub import download, is_hub_name
from ..io.processes import leave, speaks
from ..io.resources import default_threads
from ..version import __version__
from . import bench, export, quantize, run, verify
from .output import out_of_memory, print_error

LAB_PACKAGES = {
    "torch", "safetensors", "onnx", "onnx_ir", "bitsandbytes", "matplotlib", "datasets", "pyarrow",
}  # fmt: skip
WRITTEN = ("output", "plot")  # options that name what a command writes
MORE = "More options"

app = typer.Typer(name="diffbit", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _show_version(is_given: bool) -> None:
    if is_given:
        print(__version__)
        raise typer.Exit


def _show_library(is_given: bool) -> None:
    if is_given:
        from ..runtime.native import library

        if (path := library()) is None:
            raise DiffbitError("this installation has no native library; it needs a C++ compiler when it is installed")
        print(path)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
    library: Annotated[
        bool,
        typer.Option(
            "--library-path",
            is_eager=True,
            callback=_show_library,
            help="Print the path of the native library, beside which its C header lies, and exit.",
        ),
    ] = False,
) -> None:
    """Turn a Differential Transformer checkpoint into a low-bit model for a device, and measure what the bits cost."""


class _Terminated(SystemExit):
    """Raised on SIGTERM, so that unfinished work is cleaned up on the way out."""


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise _Terminated(128 + number)


def _downloaded(option: str, value: Any) -> Any:
    """Return the value of an option; a model's name on the hub, hf:ORG/NAME, becomes the folder that it is downloaded
    to."""
    if isinstance(value, list | tuple):
        return type(value)(_downloaded(option, item) for item in value)
    if not isinstance(value, Path) or not is_hub_name(value):
        return value
    if option in WRITTEN:
        raise DiffbitError(f"--{option} is {value.as_posix()}, wanted a place on this machine; `diffbit push` uploads")
    return download(value)


class _Command(TyperCommand):
    first: Collection[str] | None = None  # parameters whose options --help shows above the heading MORE; None: all

    def invoke(self, ctx: Any) -> Any:
        """Run the command. SIGINT and SIGTERM print what was kept, and exit with code 130 or 143."""
        # torchrun's processes wait for each other in C++, where no Python handler runs: SIGTERM must kill them directly
        handled = threading.current_thread() is threading.main_thread() and "TORCHELASTIC_RUN_ID" not in os.environ
        before = signal.signal(signal.SIGTERM, _terminate) if handled else None
        try:
            ctx.params = {name: _downloaded(name, value) for name, value in ctx.params.items()}
            return super().invoke(ctx)
        except (KeyboardInterrupt, _Terminated) as interruption:
            what = "terminated" if isinstance(interruption, _Terminated) else "interrupted"
            if speaks():
                print_error("; ".join([what, *getattr(interruption, "__notes__", ())]))
            leave()
            raise typer.Exit(143 if isinstance(interruption, _Terminated) else 130) from None
        finally:
            if handled:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def get_help(self, ctx: Any) -> str:
        """Typer's plain help, then the examples, which are not wrapped so that they can be copied at any terminal
        width. Its table in boxes cuts the names of long options off at 80 columns, and reads a * as Markdown."""
        examples, self.epilog = self.epilog, None
        markup, self.rich_markup_mode = self.rich_markup_mode, None
        try:
            return f"{super().get_help(ctx)}\n\n{examples}\n"
        finally:
            self.epilog, self.rich_markup_mode = examples, markup

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Return the arguments, the options that `first` names, and the others below MORE."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], MORE: []}
        for parameter in self.get_params(ctx):
            common = self.first is None or parameter.name in (*self.first, "help")
            section = ("Options" if common else MORE) if isinstance(parameter, TyperOption) else "Arguments"
            if (record := parameter.get_help_record(ctx)) is not None:
                sections[section].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _add(module: ModuleType, name: str, examples: Iterable[str]) -> None:
    """Add the command that a module's function `name` is; FIRST, if the module has it, names the parameters to show
    first. The four spaces turn its examples into a code block in docs/cli.md."""
    command = getattr(module, name)

    class Command(_Command):
        first = getattr(module, "FIRST", None)

    summary = (command.__doc__ or "").partition("\n")[0]
    lines = "\n".join(f"    {line}" for line in examples)
    app.command(cls=Command, short_help=summary, epilog=f"Examples:\n\n{lines}")(command)


for _module in (quantize, export, verify, run, bench):
    _add(_module, _module.__name__.rpartition(".")[2], _module.EXAMPLES)
for _name in plugins.names("diffbit.apps"):
    if find_spec(_file := f"diffbit.apps.{_name}.command") is not None:  # else it has no command
        _module = import_module(_file)
        for _command, _examples in _module.EXAMPLES.items():
            _add(_module, _command, _examples)


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
    if (threads := default_threads()) is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torch and numpy do not see the quota of a container
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
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if "failed to map segment" in str(error):  # the dynamic loader's words
            message = f"the memory does not suffice to load Python's packages ({error}); raise its limit (ulimit -v)"
        elif package in LAB_PACKAGES:
            message = str(MissingDependency(package, "lab", "this command", error))
        else:
            raise
    except (RuntimeError, MemoryError, OSError) as error:
        if (sentence := out_of_memory(error)) is not None:
            message = sentence
        elif isinstance(error, OSError):
            message = f"{error.filename or 'input or output'}: failed ({error.strerror or error})"
        else:
            raise
    if speaks():
        print_error(message)
    leave()
    sys.exit(2)
