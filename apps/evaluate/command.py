"""diffbit compare and diffbit outliers: measure accuracy against bit-width, and the largest activations."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...cli import (
    Data,
    Field,
    Json,
    Length,
    MaxWindows,
    Quiet,
    Seed,
    TorchDevice,
    print_json,
    print_table,
    read_windows,
    remark,
    torch_device,
)
from ...cli.options import CALIBRATION_WINDOWS, completion, modules
from ...cli.output import attention_name
from ...cli.quantize import LAYER_ERRORS
from ...io.errors import DiffbitError
from ...io.fields import Count, get, located
from ...io.files import folder_name, locked, read_json

if TYPE_CHECKING:
    from ...calib_data import NeedleWindows, Windows
    from ...runtime import Artifact
    from .compare import Comparison
    from .outliers import OutlierReport

EXAMPLES = {
    "compare": (
        "diffbit compare out/demo/diff_v1 out/demo/softmax --bits 16,8,4,3,2 -o out/comparison",
        "diffbit compare out/demo/diff_v1 --what weights --bits 16,int4_g32,nf4 --max-windows 16",
        "diffbit compare examples/pico/diff_v1 --what weights --bits 4,3 --method rtn,gptq --repeats 5 --max-windows 8",
        "diffbit compare examples/pico/diff_v1 --what kv,qk --bits 16,8,4,2 --max-windows 16",
    ),
    "outliers": ("diffbit outliers out/demo/diff_v1 out/demo/softmax --plot out/outliers.svg",),
}


Models = Annotated[
    list[Path],
    typer.Argument(
        help="Checkpoints with the same tokenizer. Float ones are quantized to every format, quantized ones are "
        "measured as they are."
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Output folder for report.html, plots, JSON and CSV.")
]
Bits = Annotated[
    str,
    typer.Option(metavar="FORMATS", help="Bit-widths or formats, such as 16,8,6,4,3,2,ternary,int4_g32,nf4."),
]
What = Annotated[
    str,
    typer.Option(metavar="WHAT", help="What is quantized, separated by commas: weights, logits, qk, kv, keys, values."),
]
Methods = Annotated[
    str,
    typer.Option(
        metavar="METHODS",
        autocompletion=completion(modules("quantize", "methods"), "+,"),
        help="Methods for the weights, separated by commas; each as for `diffbit quantize --method`.",
    ),
]
Calibrate = Annotated[
    str, typer.Option(metavar="TEXT", help="Calibration text for methods that need it, with the same values as --data.")
]
Needles = Annotated[
    str | None,
    typer.Option(
        metavar="N:Q[:LENGTH]",
        help="Also measure retrieval: in texts of LENGTH tokens, how many of Q queries for N key-value needles are "
        "answered; several settings are separated by commas, such as 1:1,6:2:512.",
    ),
]
Rows = Annotated[int, typer.Option(help="Texts for each setting of --retrieval.")]
BatchSize = Annotated[int, typer.Option(help="Windows per batch.")]
Artifacts = Annotated[
    list[Path] | None,
    typer.Option(
        help="Artifact of one of the float models, measured on ONNX Runtime on the same text. With -o, the report also "
        "shows the sizes of its parts. Repeatable."
    ),
]
Quantized = Annotated[
    list[Path] | None,
    typer.Option(help="Quantized checkpoint whose layer errors the report shows; repeatable."),
]
Repeats = Annotated[
    int,
    typer.Option(
        help="Number of roundings of the weights to each format, each with another sample of the calibration text and "
        "another order of the model's channels. The intervals include their spread; with 1, they cover the text only."
    ),
]
Runs = Annotated[
    int,
    typer.Option(
        help="Number of training runs of each model. Every N checkpoints in a row are runs of one model with different "
        "seeds, and are compared as one. The intervals then cover another training run; with 1, they do not."
    ),
]
Kind = Annotated[
    Literal["artifact", "float"],
    typer.Option(
        "--arithmetic",
        help="Inputs of quantized layers: artifact rounds them to int8, as the artifact's operators do on a CPU; float "
        "leaves them unrounded.",
    ),
]


def compare(
    models: Models,
    output: Output = None,
    bits: Bits = "16,8,6,4,3,2,ternary",
    what: What = "weights,logits",
    method: Methods = "rtn",
    calibrate: Calibrate = "mix",
    repeats: Repeats = 1,
    runs: Runs = 1,
    arithmetic: Kind = "artifact",
    data: Data = "stdlib",
    field: Field = "text",
    max_windows: MaxWindows = 64,
    length: Length = None,
    retrieval: Needles = None,
    rows: Rows = 64,
    batch_size: BatchSize = 8,
    artifact: Artifacts = None,
    quantized: Quantized = None,
    device: TorchDevice = "auto",
    seed: Seed = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure accuracy against bit-width: perplexity, KL divergence and top-1 agreement, with 95 % intervals.

    All models and formats are measured on the same text, and their differences are paired. Attention can be quantized
    too: its logits at any number of bits, qk (integer products of queries and keys) at 8 or 4, and kv (the KV cache),
    or keys and values alone, at 8, 4 or 2.
    """
    from ...quantize import parse_recipe
    from .compare import compare as compare_models

    artifacts = _check_places(output, artifact or (), quantized or ())
    with nullcontext() if output is None else locked(output):
        firsts = models[::runs] if runs > 0 else models  # what the report shows of a model, besides its accuracy
        known = _read_reports(firsts, quantized or ())
        windows = read_windows(models[0], data, field, max_windows, length)
        needles = _needles(models, retrieval, data, field, rows, seed)
        methods = method.split(",")
        calibrated = "weights" in what.split(",") and any(parse_recipe(name).calibrated for name in methods)
        calibration = _calibration(models[0], calibrate, field, repeats) if calibrated else []
        comparison = compare_models(
            models,
            windows,
            bits.split(","),
            what.split(","),
            methods,
            calibration=calibration,
            repeats=repeats,
            runs=runs,
            arithmetic=arithmetic,
            artifacts=artifacts,
            batch_size=batch_size,
            device=torch_device(device),
            needles=needles,
        )
        if output is not None:
            known |= {"artifacts": [_artifact_row(opened) for opened in artifacts]}
            outliers = _outliers(firsts, windows, device)
            _write(comparison, [report.to_dict() for report in outliers], known, output)
        if as_json:
            print_json(comparison.to_dict())
            return
        print_table(comparison.rows())
        _remarks(comparison, len(methods) > 1)
        if output is not None:
            remark(f"report: {output / 'report.html'}")


def _check_places(output: Path | None, artifacts: Sequence[Path], quantized: Sequence[Path]) -> list[Artifact]:
    """Open the artifacts; check the output folder and the --quantized folders before the comparison starts."""
    from ...runtime import Artifact

    if output is None and quantized:
        raise DiffbitError("--quantized only affects the report; pass an output folder for the report with -o")
    if output is not None and output.is_file():
        raise DiffbitError(f"{output}: is a file, wanted a folder to write to; choose another name")
    for path in quantized:
        if not (path / LAYER_ERRORS).is_file():
            raise DiffbitError(f"{path}: has no {LAYER_ERRORS}; pass a folder that `diffbit quantize` wrote")
    return [Artifact.open(path) for path in artifacts]


def _calibration(model: Path, text: str, field: str, repeats: int) -> list[Windows]:
    """A calibration sample for each repeat; the first is the one that `diffbit quantize` uses."""
    from ...calib_data import samples

    if repeats == 1:
        return [read_windows(model, text, field, CALIBRATION_WINDOWS, None, split="calib")]
    whole = read_windows(model, text, field, None, None, split="calib")
    return samples(whole, CALIBRATION_WINDOWS, repeats)


def _read_reports(models: Sequence[Path], quantized: Sequence[Path]) -> dict[str, Any]:
    """What `train` and `quantize` recorded about the models, by the names of ReportData's fields."""
    return {
        "training": {folder_name(model): found for model in models if (found := _training(model))},
        "quantization": {folder_name(path): _layer_errors(path / LAYER_ERRORS) for path in quantized},
    }


def _training(model: Path) -> dict[str, Any] | None:
    """How `diffbit train` trained a model; None: another program trained it."""
    path = model / "training.json"
    if not path.is_file():
        return None
    run = read_json(path)
    with located(path, "; restore or remove it"):
        config, result = (get(run, name, Mapping[str, Any]) for name in ("config", "result"))
        sizes = [get(config, name, Count, place="config") for name in ("steps", "batch_size", "accumulate", "length")]
        return {
            "tokens": math.prod(sizes) * get(run, "processes", Count),
            "training_s": get(result, "seconds", float, place="result"),
            "eval_loss": get(result, "eval_loss", float, place="result"),
        }


def _layer_errors(path: Path) -> dict[str, Any]:
    """A report that `diffbit quantize` wrote."""
    values = read_json(path)
    with located(path, "; it was changed after diffbit wrote it; write it again"):
        get(values, "weights", tuple[Mapping[str, Any], ...])
    return values


def _needles(
    models: Sequence[Path], entries: str | None, data: str, field: str, rows: int, seed: int
) -> list[NeedleWindows]:
    """Build texts with needles for every N:Q[:LENGTH], no longer than the shortest context among the models."""
    from ...calib_data import needle_windows
    from ...models import Checkpoint
    from .retrieval import parse_setting

    context = min(Checkpoint(model).config.max_position for model in models)
    asked = [parse_setting(entry, context) for entry in entries.split(",")] if entries else []
    return [
        needle_windows(data, models[0], length, needles, queries, rows, field=field, seed=seed)
        for needles, queries, length in asked
    ]


def _artifact_row(opened: Artifact) -> dict[str, Any]:
    """Format, sizes and parts of an artifact, as ReportData's `artifacts` shows them."""
    from ...models import ModelConfig, num_parameters

    scheme: dict[str, Any] = {"weights": "none", "attention": {}, **(opened.scheme or {})}
    weights = opened.dtype if scheme["weights"] == "none" else scheme["weights"]
    return {
        "name": folder_name(opened.path),
        "format": ", ".join(filter(None, (weights, attention_name(scheme["attention"])))),
        "bytes": opened.nbytes,
        "source_bytes": 2 * num_parameters(ModelConfig.from_dict(dict(opened.model))),
        "parts": [asdict(part) for part in opened.parts],
    }


def _write(comparison: Comparison, outliers: list[dict[str, Any]], known: dict[str, Any], output: Path) -> None:
    """Write report.html, the plots, and the comparison as JSON and CSV."""
    from .plots import plot_comparison, plot_outliers
    from .report import ReportData, versions, write_report

    report = ReportData(
        title="Accuracy against bit-width",
        comparison=comparison.to_dict(),
        outliers=outliers,
        commands=[shlex.join(["diffbit", *sys.argv[1:]])],
        versions=versions(),
        **known,
    )
    comparison.write_json(output / "comparison.json")
    comparison.write_csv(output / "comparison.csv")
    if any(result.what not in ("none", "artifact") for result in comparison.results):  # else there are no bits to plot
        plot_comparison(comparison.to_dict(), output / "comparison.svg")
    plot_outliers(outliers, output / "outliers.svg")
    write_report(report, output / "report.html")


def _remarks(comparison: Comparison, several: bool) -> None:
    """Print which formats a method refused, and which model loses less. several: name the methods."""
    for refusal in comparison.refused:
        remark(f"left out, {refusal.model} by {refusal.method}: {refusal.reason}")
    for contrast in comparison.contrasts:
        lost = contrast.difference
        by = f" by {contrast.method}" if several and contrast.method != "none" else ""
        verdict = "less than" if lost.high < 0 else "more than" if lost.low > 0 else "about as much as"
        counts = f", {contrast.runs} training runs of each" if contrast.runs > 1 else ""
        if contrast.repeats is not None:
            counts += ", one rounding of each" if contrast.repeats == 1 else f", {contrast.repeats} roundings of each"
        remark(
            f"{contrast.what} at {contrast.format}{by}: {contrast.model} loses {verdict} {contrast.against} "
            f"({lost.value:+.4f} nats per token, 95 %: {lost.low:+.4f} to {lost.high:+.4f}{counts})"
            + "".join(
                f"; {asked['queries']} of {asked['needles']} needles: {100 * points.value:+.1f} points "
                f"({100 * points.low:+.1f} to {100 * points.high:+.1f})"
                for asked, points in zip(comparison.needles, contrast.retrieval, strict=bool(contrast.retrieval))
            )
        )
    if any(contrast.repeats == contrast.runs == 1 for contrast in comparison.contrasts):
        remark(
            "each of these is one rounding, and another rounding may reverse them; --repeats 5 includes the spread of "
            "roundings in the intervals"
        )
    if comparison.arithmetic == "float" and any(result.what == "weights" for result in comparison.results):
        remark("inputs of quantized layers are float here; an artifact on a CPU rounds them to int8")


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
    from .outliers import rows

    reports = _outliers(models, read_windows(models[0], data, field, max_windows, length), device)
    if plot is not None:
        from .plots import plot_outliers

        plot_outliers([report.to_dict() for report in reports], plot)
    if as_json:
        print_json([report.to_dict() for report in reports])
        return
    print_table(rows(reports))
    if layers:
        print_table(row for report in reports for row in report.layer_rows())


def _outliers(models: Iterable[Path], windows: Windows, device: str) -> list[OutlierReport]:
    """Measure the outliers of each model on the same windows of text."""
    from ...quantize import load
    from .outliers import measure

    where = torch_device(device)
    return [measure(load(model, device=where), windows, name=folder_name(model)) for model in models]
