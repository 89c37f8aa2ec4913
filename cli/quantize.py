"""diffbit quantize: quantize a checkpoint's weights, KV cache and attention products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..io import plugins
from ..io.errors import DiffbitError
from ..io.files import parse_size, write_json
from .options import (
    CALIBRATION_WINDOWS,
    Field,
    Json,
    Length,
    Overwrite,
    Quiet,
    TorchDevice,
    completion,
    of_formats,
    read_windows,
)
from .output import attention_name, print_json, print_table, remark

if TYPE_CHECKING:
    from ..calib_data import Windows
    from ..quantize import AttentionScheme, Report, Scheme
    from ..quantize.report import WeightReport

CALIBRATED_ON_MIX = (
    "{} is calibrated on mix (prose, twelve languages, dialogues and code); with --calibrate, pass text similar to "
    "what the model will be used on"
)
LAYER_ERRORS = "quantization_report.json"
# the options that people use first; --help shows the others below them
FIRST = ("output", "weights", "method", "calibrate", "kv", "scheme_file", "overwrite")
EXAMPLES = (
    "diffbit quantize out/demo/diff_v1 --weights int4_g32 -o out/diff-int4",
    "diffbit quantize out/demo/diff_v1 --weights int2_g64 --method gptq --max-windows 64 -o out/diff-gptq",
    "diffbit quantize out/demo/diff_v1 --weights int2_g64 --override 'model.layers.0.*=int8' -o out/diff-int2",
    "torchrun --nproc-per-node 2 -m diffbit quantize out/demo/diff_v1 --weights int4_g32 --method gptq -o out/diff-two",
    "diffbit quantize out/demo/diff_v1 --weights int4_g32 --kv int4 --qk int8 -o out/diff-int4-kv4",
    "diffbit quantize out/demo/diff_v1 --kv int8,int4 -o out/diff-kv84",
)


def _list_methods(wanted: bool) -> None:
    if wanted:
        from ..quantize.methods import table

        print_table(table())
        raise typer.Exit


Model = Annotated[
    Path, typer.Argument(help="Checkpoint: a folder (Hugging Face's or diffbit's; docs/models.md) or a GGUF file.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Output folder for the quantized checkpoint.")]
Weights = Annotated[
    str | None,
    of_formats(
        "Weight format: int8, int4_g32, int4_g128_asym, int3_g64, int2_g64, nf4, ternary, ..., or none (float)."
    ),
]
Embedding = Annotated[
    str | None, of_formats("Format of the embedding; default: int8 if the weights are low-bit; none: float.")
]
Head = Annotated[
    str | None,
    of_formats(
        "Format of the head; default: int8 if the weights are low-bit; none: float. A tied table is stored once if "
        "both formats are the same."
    ),
]
Override = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB=FORMAT", help="Format for the modules whose names match GLOB; repeatable."),
]
Activations = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(help="Quantize activations too, with a scale per token; int4 needs ternary weights."),
]
KvCache = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        autocompletion=completion(lambda: ("fp16", "int8", "int4", "int2", "none"), ","),
        help="KV cache format: fp16, int8, int4, int2 or none (float), or one format each for keys and values: "
        "int8,int4.",
    ),
]
Qk = Annotated[
    Literal["int8", "int4", "none"] | None,
    typer.Option(
        help="Quantize queries too and multiply them with the keys as integers; keys get at most as many bits."
    ),
]
KvWindow = Annotated[
    int | None,
    typer.Option(help="Residual window: recent tokens that an int4 or int2 cache keeps in float16; default: 32."),
]
SchemeFile = Annotated[
    Path | None, typer.Option("--scheme", help="Read the whole scheme from a .json or .toml file instead.")
]
MethodName = Annotated[
    str,
    typer.Option(
        metavar="METHOD",
        autocompletion=completion(lambda: plugins.names("diffbit.quantize.methods"), "+"),
        help="Quantization method, or several joined by +: gptq, rotate+gptq, learned:50 (steps); see --list-methods.",
    ),
]
ListMethods = Annotated[
    bool, typer.Option("--list-methods", is_eager=True, callback=_list_methods, help="List the methods and exit.")
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Calibration text, with the same values as --data of other commands; each layer's output error is also "
        "measured on it. Default: mix if the method needs text, else none.",
    ),
]
CalibrationWindows = Annotated[
    int | None,
    typer.Option(
        "--max-windows", help="Maximum number of windows of text; default: 128, or 16 if it only measures errors."
    ),
]
Layers = Annotated[
    bool, typer.Option("--layers", help="Print a row for each weight instead of one for all q_proj, all down_proj, ...")
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory that the process may use, such as 4GB. Calibration states are moved to disk if necessary, and a "
        "run that cannot fit is refused. The result is bit-identical.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run, if there is one.")]


def quantize(
    model: Model,
    output: Output,
    weights: Weights = None,
    embedding: Embedding = None,
    head: Head = None,
    override: Override = None,
    activations: Activations = None,
    kv: KvCache = None,
    qk: Qk = None,
    kv_window: KvWindow = None,
    scheme_file: SchemeFile = None,
    method: MethodName = "rtn",
    list_methods: ListMethods = False,
    calibrate: Calibrate = None,
    field: Field = "text",
    max_windows: CalibrationWindows = None,
    length: Length = None,
    layers: Layers = False,
    device: TorchDevice = "cpu",
    resume: Resume = False,
    max_memory: MaxMemory = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a checkpoint: its weights, layer by layer, its KV cache and its attention products.

    With low-bit weights, embedding and head are int8 unless --embedding and --head set another format. Norms stay
    float, and so does lambda unless --override names it. Under torchrun, processes on one machine or on several share
    the work; the result is the same to the bit. --device cuda computes on a GPU, whose result differs slightly, because
    it sums in another order.
    """
    from ..io.processes import processes
    from ..quantize import quantize_checkpoint
    from ..quantize.methods import parse_recipe

    here = processes(device)
    calibrated = parse_recipe(method).calibrated
    scheme = read_scheme(scheme_file, weights, embedding, head, override, activations, kv, qk, kv_window)
    if calibrate is None and calibrated:
        calibrate = "mix"
        remark(CALIBRATED_ON_MIX.format(method))
    text = None
    if calibrate is not None:
        most = max_windows if max_windows is not None else CALIBRATION_WINDOWS if calibrated else 16
        text = here.of_first(partial(read_windows, model, calibrate, field, most, length, "calib"))
    report = quantize_checkpoint(
        model, output, scheme, method=method, **_calibration(text), overwrite=overwrite, resume=resume,
        max_memory=None if max_memory is None else parse_size(max_memory), here=here,
    )  # fmt: skip
    if not here.first:
        return
    values = report.to_dict()
    write_json(output / LAYER_ERRORS, values)
    for warning in report.warnings:
        remark(f"warning: {warning}")
    if as_json:
        print_json({"output": str(output), **values})
    else:
        _show(report, output, layers)


def _calibration(text: Windows | None) -> dict[str, Any]:
    if text is None:
        return {}
    about = {"source": text.source, "sha256": text.sha256}
    return {"calibration": text.ids, "calibration_mask": text.mask, "calibration_text": about}


def read_scheme(
    file: Path | None,
    weights: str | None,
    embedding: str | None,
    head: str | None,
    override: list[str] | None,
    activations: str | None,
    kv: str | None,
    qk: str | None,
    kv_window: int | None,
    *,
    weights_later: bool = False,
) -> Scheme:
    """Read the scheme from the file or the options. weights_later: the weights' formats are chosen afterwards."""
    from ..formats import parse_format
    from ..quantize import Scheme, table_formats
    from ..quantize.scheme import parse_override

    options = (weights, embedding, head, override, activations, kv, qk, kv_window)
    if file is not None:
        if any(option is not None for option in options):
            raise DiffbitError(
                "--scheme reads the whole scheme from a file; leave out --weights, --embedding, --head, --override, "
                "--activations, --kv, --qk and --kv-window"
            )
        return Scheme.from_file(file)
    if (
        all(option in (None, "none") for option in (weights, embedding, head, kv, qk))
        and not override
        and not weights_later
    ):
        raise DiffbitError(
            "nothing to quantize: pass --weights FORMAT, --embedding, --head, --kv FORMAT, --qk FORMAT, --override or "
            "--scheme FILE"
        )
    format = None if weights in (None, "none") else parse_format(weights)
    tables = table_formats(weights_later or format is not None, embedding, head)
    return Scheme(
        weights=format,
        embedding=tables[0],
        head=tables[1],
        activations=activations,
        attention=_attention(kv, qk, kv_window),
        overrides=tuple(parse_override(text) for text in override or ()),
    )


def _attention(kv: str | None, qk: str | None, window: int | None) -> AttentionScheme:
    from ..quantize import AttentionScheme
    from ..quantize.scheme import parse_kv

    chosen: dict[str, Any] = {"qk": None if qk == "none" else qk}
    chosen |= {} if kv is None else parse_kv(kv)
    chosen |= {} if window is None else {"window": window}
    found = AttentionScheme(**chosen)
    if window is not None and not found.has_window:
        raise DiffbitError(
            "--kv-window applies only to an int4 or int2 cache; pass --kv int4 or --kv int2, or leave --kv-window out"
        )
    return found


def _show(report: Report, output: Path, each: bool) -> None:
    """Print tables of the weights and the KV cache, and the size of the model."""
    if report.weights:
        print_table(_weight_rows(report.weights, each))
    before, after = report.before, report.after
    if attention := report.scheme.attention.to_dict():
        print_table(
            {
                "KV cache": name,
                "bytes per 1000 tokens": size.kv_bytes_per_1k_tokens,
                "bytes of the residual window": size.kv_fixed_bytes,
            }
            for name, size in (("before", before), (attention_name(attention), after))
        )
    remark(
        f"{output}: {after.nbytes / 1e6:,.2f} MB of weights in an fp32 artifact, {after.bits_per_weight:.2f} bits per "
        f"weight (before: {before.nbytes / 1e6:,.2f} MB, {before.bits_per_weight:.2f})"
    )


def _weight_rows(weights: Sequence[WeightReport], each: bool) -> list[dict[str, Any]]:
    """Return a row per quantized weight, or per module name (q_proj, ...) with the mean error and the worst layer."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def error(weight: WeightReport) -> float:
        return weight.weight_error if weight.output_error is None else weight.output_error

    calibrated = any(weight.proxy_loss is not None for weight in weights)
    groups: dict[tuple[str, str], list[WeightReport]] = {}
    for weight in weights:
        groups.setdefault((weight.name if each else weight.name.rpartition(".")[2], weight.format), []).append(weight)
    rows = []
    for (name, format), group in groups.items():
        row: dict[str, Any] = {
            "weight": name,
            "format": format,
            "weight error": percent(mean(weight.weight_error for weight in group)),
            "output error": percent(mean(weight.output_error for weight in group)),
        }
        if calibrated:
            row |= {"proxy loss": mean(weight.proxy_loss for weight in group)}
        if not each:
            worst = max(group, key=error)
            place = worst.name.removeprefix("model.").rpartition(".")[0]
            row |= {"worst": f"{percent(error(worst))} in {place}" if place else "-"}
        bits = sum(weight.nbytes for weight in group) * 8 / sum(math.prod(weight.shape) for weight in group)
        rows.append(row | {"bits/weight": bits, "bytes": sum(weight.nbytes for weight in group)})
    return rows
