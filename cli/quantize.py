"""diffbit quantize: quantize a checkpoint's weights, KV cache and attention products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..io.processes import speaks
from .options import FORMATS, Adapter, Json, Overwrite, Quiet, TorchDevice, with_settings
from .output import print_json, print_table, remark
from .scheme_options import MaxMemory, MethodOptions, Model, SchemeOptions

if TYPE_CHECKING:
    from ..quantize import Report, WeightReport

# the options that people use first; --help shows the others below them
FIRST = ("output", "size", "bits", "weights", "fast", "calibrate", "kv", "overwrite")
EXAMPLES = (
    "diffbit quantize out/demo/diff_v1 -o out/diff-low",
    "diffbit quantize out/demo/diff_v1 --bits 4 -o out/diff-small",
    "diffbit quantize out/demo/diff_v1 --weights int4_g32 -o out/diff-int4",
    "diffbit quantize out/demo/diff_v1 --weights int2_g64 --method gptq --calibrate stdlib -o out/diff-gptq",
    "diffbit quantize out/demo/diff_v1 --weights int2_g64 --override 'model.layers.0.*=int8' -o out/diff-int2",
    "torchrun --nproc-per-node 2 -m diffbit quantize out/demo/diff_v1 --weights int4_g32 --method gptq -o out/diff-two",
    "diffbit quantize out/demo/diff_v1 --weights int4_g32 --kv int4 --qk int8 -o out/diff-int4-kv4",
    "diffbit quantize out/demo/diff_v1 --kv int8,int4 -o out/diff-kv84",
    "diffbit quantize examples/pico/softmax --adapter out/adapter --weights int4_g32 -o out/adapted-int4",
)


def _list_methods(is_given: bool) -> None:
    if is_given:
        from ..quantize.methods import table

        print_table(table())
        raise typer.Exit


def _list_formats(is_given: bool) -> None:
    if is_given:
        _show_formats(FORMATS)


def _list_all_formats(is_given: bool) -> None:
    if is_given:
        from ..formats import names

        _show_formats(names())


def _show_formats(names: Iterable[str]) -> None:
    """Print a row per format, and exit."""
    from ..formats import parse_format

    shape = 4096, 4096
    print_table(
        {
            "format": name,
            "bits/weight on a device": f"{8 * parse_format(name).device_nbytes(shape, 4) / math.prod(shape):.2f}",
            "use": FORMATS.get(name, ""),
        }
        for name in names
    )
    raise typer.Exit


Output = Annotated[Path, typer.Option("--output", "-o", help="Output folder for the quantized checkpoint.")]
ListMethods = Annotated[
    bool, typer.Option("--list-methods", is_eager=True, callback=_list_methods, help="List the methods and exit.")
]
ListFormats = Annotated[
    bool,
    typer.Option(
        "--list-formats",
        is_eager=True,
        callback=_list_formats,
        help="List the formats to choose from first, with the use of each, and exit.",
    ),
]
ListAllFormats = Annotated[
    bool,
    typer.Option(
        "--list-all-formats",
        is_eager=True,
        callback=_list_all_formats,
        help="List all formats that can be chosen, and exit.",
    ),
]
Layers = Annotated[
    bool, typer.Option("--layers", help="Print a row for each weight instead of one for all q_proj, all down_proj, ...")
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits", help="Choose a format for each layer, with this many bits per weight on average, scales included."
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size", metavar="SIZE", help="Choose a format for each layer, for an artifact of at most 90MB, 1.2GB, ..."
    ),
]
Fast = Annotated[
    bool, typer.Option("--fast", help="Round to nearest, weighted by each layer's inputs, in one pass over the text.")
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure", help="Compare the result with the float model on about 2,000 tokens of held-out text."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run, if there is one.")]


@with_settings(SchemeOptions, "options")
@with_settings(MethodOptions, "rounding")
def quantize(
    model: Model,
    output: Output,
    options: SchemeOptions,
    rounding: MethodOptions,
    adapter: Adapter = None,
    size: Size = None,
    bits: Bits = None,
    fast: Fast = False,
    measure: Measure = True,
    list_methods: ListMethods = False,
    list_formats: ListFormats = False,
    list_all_formats: ListAllFormats = False,
    layers: Layers = False,
    device: TorchDevice = "cpu",
    resume: Resume = False,
    max_memory: MaxMemory = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a checkpoint: its weights, layer by layer, its KV cache and its attention products.

    Without options, each layer gets a format so that the model loses least at 5 bits per weight on average, and the
    method is the best that fits in memory; --size and --bits choose how large the result is. With --weights, all layers
    get one format, and embedding and head are int8 unless --embedding and --head set another. Norms stay float, and so
    does lambda unless --override names it. The result is compared with the float model on held-out text.

    Under torchrun, processes on one machine or on several share the work; the result is the same to the bit. --device
    cuda computes on a GPU, whose result differs slightly, because it sums in another order.
    """
    from .automatic import quantize_model, summary, values

    done = quantize_model(
        model, output, options, rounding, adapter=adapter, bits=bits, size=size, fast=fast, measure=measure,
        device=device, resume=resume, overwrite=overwrite, max_memory=max_memory,
    )  # fmt: skip
    if not speaks():
        return
    for warning in done.report.warnings:
        remark(f"warning: {warning}")
    if as_json:
        print_json({"output": str(output), **values(done)})
    else:
        _show(done.report, layers)
        remark(summary(done, output))


def _show(report: Report, by_weight: bool) -> None:
    """Print tables of the weights and of the KV cache."""
    if report.weights:
        print_table(_weight_rows(report.weights, by_weight))
    before, after = report.before, report.after
    if attention := report.scheme.attention.describe():
        print_table(
            {
                "KV cache": name,
                "bytes per 1000 tokens": size.kv_bytes_per_1k_tokens,
                "fixed bytes": size.kv_fixed_bytes,
            }
            for name, size in (("before", before), (attention, after))
        )


def _weight_rows(weights: Sequence[WeightReport], by_weight: bool) -> list[dict[str, Any]]:
    """Return a row per quantized weight, or per module name (q_proj, ...) with the mean error and the worst layer."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def error(weight: WeightReport) -> float:
        return weight.weight_error if weight.output_error is None else weight.output_error

    groups: dict[tuple[str, str], list[WeightReport]] = {}
    for weight in weights:
        groups.setdefault((weight.name if by_weight else weight.name.rpartition(".")[2], weight.format), []).append(
            weight
        )
    rows = []
    for (name, format), group in groups.items():
        row: dict[str, Any] = {
            "weight": name,
            "format": format,
            "weight error": percent(mean(weight.weight_error for weight in group)),
            "output error": percent(mean(weight.output_error for weight in group)),
        }
        if not by_weight:
            worst = max(group, key=error)
            place = worst.name.removeprefix("model.").rpartition(".")[0]
            row |= {"worst": f"{percent(error(worst))} in {place}" if place else "-"}
        bits = sum(weight.nbytes for weight in group) * 8 / sum(math.prod(weight.shape) for weight in group)
        rows.append(row | {"bits/weight": bits, "bytes": sum(weight.nbytes for weight in group)})
    return rows
