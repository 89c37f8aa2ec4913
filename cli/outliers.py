"""diffbit outliers: measure the largest attention logits and hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..files import folder_name
from .options import Data, Field, Json, Length, MaxWindows, Quiet, TorchDevice, read_windows, torch_device
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..calib_data import Windows
    from ..evaluate.outliers import OutlierReport

EXAMPLES = ("diffbit outliers out/demo/diff_v1 out/demo/softmax --plot out/outliers.svg",)


def outliers(
    models: Annotated[list[Path], typer.Argument(help="Checkpoints, float or quantized.")],
    data: Data = "stdlib",
    field: Field = "text",
    max_windows: MaxWindows = 32,
    length: Length = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also print a row for each layer.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of every layer to this .svg or .png file.")] = None,
    device: TorchDevice = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the largest attention logits and hidden states of models, as Table 5 of arXiv 2410.05258 does."""
    from ..evaluate.outliers import rows

    reports = measure_outliers(models, read_windows(models[0], data, field, max_windows, length), device)
    if plot is not None:
        from ..evaluate import plot_outliers

        plot_outliers([report.to_dict() for report in reports], plot)
    if as_json:
        print_json([report.to_dict() for report in reports])
        return
    print_table(rows(reports))
    if layers:
        print_table(row for report in reports for row in report.layer_rows())


def measure_outliers(models: Iterable[Path], windows: Windows, device: str) -> list[OutlierReport]:
    """Measure the outliers of each model on the same windows of text."""
    from ..evaluate.outliers import measure
    from ..quantize import load

    where = torch_device(device)
    return [measure(load(model, device=where), windows, name=folder_name(model)) for model in models]
