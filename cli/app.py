"""The application: its commands, in the order in which --help lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..version import __version__
from . import bench, chat, compare, export, outliers, quantize, run, train, verify

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


class _Command(TyperCommand):
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
_add(quantize.quantize, quantize.EXAMPLES)
_add(export.export, export.EXAMPLES)
_add(verify.verify, verify.EXAMPLES)
_add(run.run, run.EXAMPLES)
_add(chat.chat, chat.EXAMPLES)
_add(bench.bench, bench.EXAMPLES)
_add(compare.compare, compare.EXAMPLES)
