"""diffbit outliers: measure the largest activations of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cli import (
    Data,
    Field,
    Json,
    Length,
    MaxWindows,
    Quiet,
    TorchDevice,
    print_json,
    print_table,
    read_windows,
    torch_device,
)
from ...io.drawing import SITES, check_plot, outliers_chart, write_charts
from ...io.files import folder_name

EXAMPLES = {"outliers": ("diffbit outliers out/demo/diff_v1 out/demo/softmax --plot out/outliers.svg",)}


def outliers(
    models: Annotated[list[Path], typer.Argument(help="Checkpoints, float or quantized.")],
    data: Data = "mix",
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
    from ...quantize import load
    from .activations import measure, rows

    if plot is not None:
        check_plot(plot)
    windows = read_windows(models[0], data, field, max_windows, length)
    torch_name = torch_device(device)
    reports = [measure(load(model, device=torch_name), windows, name=folder_name(model)) for model in models]
    numbers = [report.to_dict() for report in reports]
    if plot is not None:
        write_charts(plot, [outliers_chart(numbers, site) for site in SITES])
    if as_json:
        print_json(numbers)
        return
    print_table(rows(reports))
    if layers:
        print_table(row for report in reports for row in report.layer_rows())
