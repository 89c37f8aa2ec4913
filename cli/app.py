"""The application: its commands, in the order in which --help lists them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from ..version import __version__
from . import bench, compare, export, outliers, quantize, run, train, verify

app = typer.Typer(
    name="diffbit",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """From a Differential Transformer checkpoint to a low-bit model on a device, with the cost of every bit shown."""


def _examples(lines: tuple[str, ...]) -> str:
    """The end of a command's help: examples, each on a line of its own."""
    return "Example:\n\n" + "\n\n".join(f"  {escape(line)}" for line in lines)


app.command(epilog=_examples(train.EXAMPLES))(train.train)
app.command(epilog=_examples(quantize.EXAMPLES))(quantize.quantize)
app.command(epilog=_examples(export.EXAMPLES))(export.export)
app.command(epilog=_examples(run.EXAMPLES))(run.run)
app.command(epilog=_examples(verify.EXAMPLES))(verify.verify)
app.command(epilog=_examples(bench.EXAMPLES))(bench.bench)
app.command(epilog=_examples(outliers.EXAMPLES))(outliers.outliers)
app.command(epilog=_examples(compare.EXAMPLES))(compare.compare)
