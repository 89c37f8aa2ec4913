"""diffbit convert: give a model another attention, or merge an adapter into it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...cli import Adapter, Json, Overwrite, Quiet, print_json, print_table

EXAMPLES = {
    "convert": (
        "diffbit convert examples/pico/softmax -o out/differential",
        "diffbit convert examples/pico/softmax --start rotated -o out/rotated",
        "diffbit convert examples/pico/softmax --start rotated --lambda 0.2 -o out/subtracting",
        "diffbit convert examples/pico/diff_v2 --to moh --heads 0.75 -o out/mixture",
        "diffbit convert examples/pico/softmax --adapter out/adapter -o out/merged",
    )
}


def convert(
    model: Annotated[Path, typer.Argument(help="Model: a float checkpoint folder, or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder: the new checkpoint.")],
    adapter: Adapter = None,
    to: Annotated[
        Literal["diff_v2", "moh"] | None,
        typer.Option(
            help="diff_v2: differential attention, version 2, of a plain Transformer. moh: a mixture of heads, of a "
            "plain or differential model, which turns heads off by token. Default: diff_v2; with --adapter the "
            "attention stays as it is."
        ),
    ] = None,
    start: Annotated[
        Literal["copy", "rotated"] | None,
        typer.Option(
            help="copy: the noise query is the signal query, and the model computes the same function, exactly. "
            "rotated: it is turned by --angle, and lambda starts at 0.0025, near the same function. Default: copy; "
            "with --adapter the model does not become differential."
        ),
    ] = None,
    angle: Annotated[
        float | None,
        typer.Option(help="Angle between the two queries of --start rotated, in degrees; default: 90 (orthogonal)."),
    ] = None,
    lambda_start: Annotated[
        float | None,
        typer.Option(
            "--lambda",
            help="Where lambda starts, in (0, 1); o_proj is divided by 1 - lambda. Default: 0.5 for --start copy; "
            "0.0025 for rotated, which keeps its o_proj: larger ones are farther from the model's function.",
        ),
    ] = None,
    heads: Annotated[
        float | None, typer.Option(help="Of --to moh: the share of heads that are on for a token; default: 0.75.")
    ] = None,
    shared: Annotated[
        float | None,
        typer.Option(
            help="Of --to moh: the share of all heads that are always on; default: two thirds of those that are on."
        ),
    ] = None,
    choose: Annotated[
        Literal["first", "importance"] | None,
        typer.Option(
            help="Of --to moh: which heads are always on. first: the first ones. importance: those that move the loss "
            "of a text most, which needs the whole model in memory. Default: first."
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text for --choose importance, with the same values as --data of other commands; default: mix.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Data type of the weights; default: as they are. Weights quantized in a GGUF file are float32."
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert a model to another attention: to a differential one that computes the same function, or to a mixture of
    heads that computes a part of them.

    Any llama, mistral, qwen2 or qwen3 model, from a folder or a GGUF file. The result is a float checkpoint: quantize,
    export or train it (`diffbit train --init`). With --adapter, merge a LoRA adapter into its model instead.
    """
    import torch

    from ...models import Checkpoint, num_parameters
    from .write import convert as write

    write(
        model,
        output,
        to=to,
        start=start,
        angle=angle,
        lambda_start=lambda_start,
        heads=heads,
        shared=shared,
        choose=choose,
        calibrate=calibrate,
        adapter=adapter,
        dtype=None if dtype is None else getattr(torch, dtype),
        overwrite=overwrite,
    )
    rows = []
    for path in (model, output):
        checkpoint = Checkpoint(path, adapter if path == model else None)
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
        rows.append({
            "model": str(path), "attention": checkpoint.config.attention, "dtype": checkpoint.dtype,
            "parameters": num_parameters(checkpoint.config), "bytes": size,
        })  # fmt: skip
    if as_json:
        print_json({"output": str(output), "to": to, "start": start, "before": rows[0], "after": rows[1]})
    else:
        print_table(rows)
