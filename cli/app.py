"""The application: its commands, in the order in which --help lists them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from ..processes import leave, speaks
from ..version import __version__
from . import bench, chat, compare, export, outliers, plan, quantize, run, serve, train, verify, web
from .output import print_error

app = typer.Typer(name="diffbit", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """From a Differential Transformer checkpoint to a low-bit model on a device, with the cost of every bit shown."""


class _Terminated(SystemExit):
    """SIGTERM: what was begun is tidied up on the way out."""


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise _Terminated(128 + number)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        """Run the command. SIGINT and SIGTERM end in a sentence, which says what was kept, and 130 or 143."""
        # torchrun's processes wait for each other in C++, where no handler runs: SIGTERM has to end them
        handled = threading.current_thread() is threading.main_thread() and "TORCHELASTIC_RUN_ID" not in os.environ
        before = signal.signal(signal.SIGTERM, _terminate) if handled else None
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, _Terminated) as stop:
            what = "terminated" if isinstance(stop, _Terminated) else "interrupted"
            if speaks():
                print_error("; ".join([what, *getattr(stop, "__notes__", ())]))
            leave()
            raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None
        finally:
            if handled:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def get_help(self, ctx: Any) -> str:
        """Typer's own help wraps; the examples after it do not, so that they can be copied at any terminal width."""
        examples, self.epilog = self.epilog, None
        try:
            return f"{super().get_help(ctx)}{examples}\n"
        finally:
            self.epilog = examples


def _add(command: Callable[..., None], examples: tuple[str, ...]) -> None:
    """Add a command; in docs/cli.md the four spaces make its examples a block of code."""
    summary = (command.__doc__ or "").partition("\n")[0]
    lines = "\n".join(f"    {line}" for line in examples)
    app.command(cls=_Command, short_help=summary, epilog=f"Examples:\n\n{lines}")(command)


_add(train.train, train.EXAMPLES)
_add(outliers.outliers, outliers.EXAMPLES)
_add(plan.plan, plan.EXAMPLES)
_add(quantize.quantize, quantize.EXAMPLES)
_add(export.export, export.EXAMPLES)
_add(verify.verify, verify.EXAMPLES)
_add(run.run, run.EXAMPLES)
_add(chat.chat, chat.EXAMPLES)
_add(serve.serve, serve.EXAMPLES)
_add(web.web, web.EXAMPLES)
_add(bench.bench, bench.EXAMPLES)
_add(compare.compare, compare.EXAMPLES)
