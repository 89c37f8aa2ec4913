"""diffbit compare: measure accuracy against bit-width."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
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
    completion,
    json_of,
    print_json,
    print_table,
    read_windows,
    remark,
    torch_device,
)
from ...io import plugins
from ...io.errors import DiffbitError
from ...io.files import folder_name, locked, read_json
from ...settings import CALIBRATION_WINDOWS

if TYPE_CHECKING:
    from ...calib_data import NeedleWindows
    from ...runtime import Artifact
    from .compare import Comparison

EXAMPLES = {
    "compare": (
        "diffbit compare out/demo/diff_v1 out/demo/softmax --bits 16,8,4,3,2 -o out/comparison",
        "diffbit compare out/demo/diff_v1 --what weights --bits 16,int4_g32,nf4 --max-windows 16",
        "diffbit compare examples/pico/diff_v1 --what weights --bits 4,3 --method rtn,gptq --repeats 5 --max-windows 8",
        "diffbit compare examples/pico/diff_v1 --what kv,qk --bits 16,8,4,2 --max-windows 16",
    ),
}

# fmt: off
Models = Annotated[list[Path], typer.Argument(
    help="Checkpoints with the same tokenizer. Float ones are quantized to every format, quantized ones are measured "
    "as they are."
)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for report.html, plots, JSON and CSV.")]
Bits = Annotated[str, typer.Option(
    metavar="FORMATS", help="Bit-widths or formats, such as 16,8,6,4,3,2,ternary,int4_g32,nf4."
)]
What = Annotated[str, typer.Option(
    metavar="WHAT", help="What is quantized, separated by commas: weights, logits, qk, kv, kv:0, keys, values."
)]
Methods = Annotated[str, typer.Option(
    metavar="METHODS", autocompletion=completion(lambda: plugins.names("diffbit.quantize.methods"), "+,"),
    help="Methods for the weights, separated by commas; each as for `diffbit quantize --method`.",
)]
Calibrate = Annotated[str, typer.Option(
    metavar="TEXT", help="Calibration text for methods that need it, with the same values as --data."
)]
Needles = Annotated[str | None, typer.Option(
    metavar="N:Q[:LENGTH]",
    help="Also measure retrieval: in texts of LENGTH tokens, how many of Q queries for N key-value needles are "
    "answered; several settings are separated by commas, such as 1:1,6:2:512.",
)]
Rows = Annotated[int, typer.Option(help="Texts for each setting of --retrieval.")]
BatchSize = Annotated[int, typer.Option(help="Windows per batch.")]
Artifacts = Annotated[list[Path] | None, typer.Option(
    help="Artifact of one of the float models, measured on ONNX Runtime on the same text. With -o, the report also "
    "shows the sizes of its parts. Repeatable."
)]
Quantized = Annotated[list[Path] | None, typer.Option(
    help="Quantized checkpoint whose layer errors the report shows; repeatable."
)]
Repeats = Annotated[int, typer.Option(
    help="Number of roundings of the weights to each format, each with another sample of the calibration text and "
    "another order of the model's channels. The intervals include their spread; with 1, they cover the text only."
)]
Runs = Annotated[int, typer.Option(
    help="Number of training runs of each model. Every N checkpoints in a row are runs of one model with different "
    "seeds, and are compared as one. The intervals then cover another training run; with 1, they do not."
)]
Kind = Annotated[Literal["artifact", "float"], typer.Option(
    "--arithmetic",
    help="Inputs of quantized layers: artifact rounds them to int8, as the artifact's operators do on a CPU; float "
    "leaves them unrounded.",
)]
# fmt: on


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
    too: its logits at any number of bits, qk (integer products of queries and keys) at 8 or 4, and kv (the KV cache;
    kv:0 without recent tokens in float16), or keys and values alone, at 8, 4 or 2.
    """
    from ...calib_data import samples
    from ...quantize.methods import parse_recipe
    from .compare import compare as compare_models

    artifacts = _check_places(output, artifact or (), quantized or ())
    with nullcontext() if output is None else locked(output):
        firsts = models[::runs] if runs > 0 else models  # what the report shows of a model, besides its accuracy
        recorded = _read_reports(firsts, quantized or ())
        windows = read_windows(models[0], data, field, max_windows, length)
        needles = _needles(models, retrieval or "", data, field, rows, seed)
        methods = method.split(",")
        calibrated = "weights" in what.split(",") and any(parse_recipe(name).calibrated for name in methods)
        calibration = []
        if calibrated:  # the first sample is the one that `diffbit quantize` uses
            text = read_windows(models[0], calibrate, field, None, None, split="calib")
            calibration = samples(text, CALIBRATION_WINDOWS, repeats)
        comparison = compare_models(
            models, windows, bits.split(","), what.split(","), methods, calibration=calibration, repeats=repeats,
            runs=runs, arithmetic=arithmetic, artifacts=artifacts, batch_size=batch_size, device=torch_device(device),
            needles=needles,
        )  # fmt: skip
        if output is not None:
            recorded["artifacts"] = [_artifact_row(opened) for opened in artifacts]
            options = ["--data", data, "--field", field, "--max-windows", str(max_windows), "--device", device]
            options += [] if length is None else ["--length", str(length)]
            plot = str(output / "outliers.svg")
            outliers = json_of("outliers", *options, "--plot", plot, "--", *map(str, firsts))
            _write(comparison, outliers, recorded, output)
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
    from ...quantize import REPORT_FILE

    for path in quantized:
        if not (path / REPORT_FILE).is_file():
            raise DiffbitError(f"{path}: has no {REPORT_FILE}; pass a folder that `diffbit quantize` wrote")
    return [Artifact.open(path) for path in artifacts]


def _read_reports(models: Sequence[Path], quantized: Sequence[Path]) -> dict[str, Any]:
    """What `train` and `quantize` recorded about the models, by the names of ReportData's fields."""
    from ...quantize import REPORT_FILE

    reports: dict[str, dict[str, Any]] = {"training": {}, "quantization": {}}
    paths = [(model, model / "training.json") for model in models]  # no such file: another program trained the model
    paths += [(path, path / REPORT_FILE) for path in quantized]
    for folder, path in paths:
        try:
            if path.name == REPORT_FILE:
                reports["quantization"][folder_name(folder)] = {"weights": list(read_json(path)["weights"])}
            elif path.is_file():
                reports["training"][folder_name(folder)] = _training(read_json(path))
        except (KeyError, TypeError) as error:
            raise DiffbitError(f"{path}: is not as diffbit wrote it ({error}); restore or remove it") from None
    return reports


def _training(run: dict[str, Any]) -> dict[str, Any]:
    config, result = run["config"], run["result"]
    rows = config["steps"] * config["batch_size"] * config["accumulate"] * run["processes"]
    return {"tokens": rows * config["length"], "training_s": result["seconds"], "eval_loss": result["eval_loss"]}


def _needles(models: list[Path], entries: str, data: str, field: str, rows: int, seed: int) -> list[NeedleWindows]:
    """Build texts with needles for every N:Q[:LENGTH], no longer than the shortest context among the models."""
    from ...calib_data import needle_windows
    from ...models import Checkpoint
    from .retrieval import parse_setting

    context = min(Checkpoint(model).config.max_position for model in models)
    settings = [parse_setting(entry, context) for entry in entries.split(",")] if entries else []
    return [
        needle_windows(data, models[0], length, needles, queries, rows, field=field, seed=seed)
        for needles, queries, length in settings
    ]


def _artifact_row(opened: Artifact) -> dict[str, Any]:
    """Format, sizes and parts of an artifact, as ReportData's `artifacts` shows them."""
    from ...models import ModelConfig, num_parameters
    from .variants import on_a_device

    return {
        "name": folder_name(opened.path),
        "format": on_a_device(opened).format,
        "bytes": opened.nbytes,
        "source_bytes": 2 * num_parameters(ModelConfig.from_dict(dict(opened.model))),
        "parts": [asdict(part) for part in opened.parts],
    }


def _write(comparison: Comparison, outliers: list[dict[str, Any]], recorded: dict[str, Any], output: Path) -> None:
    """Write report.html, the plot, and the comparison as JSON and CSV. recorded: further fields of ReportData."""
    from .plots import plot_comparison, subjects
    from .report import ReportData, versions, write_report

    comparison.write_json(output / "comparison.json")
    comparison.write_csv(output / "comparison.csv")
    data, command = comparison.to_dict(), shlex.join(["diffbit", *sys.argv[1:]])
    if subjects(data):  # else there are no bits to plot
        plot_comparison(data, output / "comparison.svg")
    report = ReportData(comparison=data, outliers=outliers, commands=[command], versions=versions(), **recorded)
    write_report(report, output / "report.html")


def _remarks(comparison: Comparison, several: bool) -> None:
    """Print which formats were skipped, and which model loses less. several: name the methods."""
    from .report import verdict

    for skipped in comparison.skipped:
        remark(f"left out, {skipped.model} by {skipped.method}: {skipped.reason}")
    for contrast in comparison.contrasts:
        by = f" by {contrast.method}" if several and contrast.method != "none" else ""
        lost = contrast.difference
        changes = "".join(
            f"; {setting['queries']} of {setting['needles']} needles: {100 * change.value:+.1f} points "
            f"({100 * change.low:+.1f} to {100 * change.high:+.1f})"
            for setting, change in zip(comparison.needles, contrast.retrieval, strict=bool(contrast.retrieval))
        )
        nats = f"{lost.value:+.4f} nats per token, 95 %: {lost.low:+.4f} to {lost.high:+.4f}"
        remark(f"{contrast.what} at {contrast.format}{by}: {verdict(asdict(contrast))} ({nats}{changes})")
    if any(contrast.repeats == contrast.runs == 1 for contrast in comparison.contrasts):
        remark(
            "each of these is one rounding, and another rounding may reverse them; --repeats 5 includes the spread of "
            "roundings in the intervals"
        )
    if comparison.arithmetic == "float" and any(result.what == "weights" for result in comparison.results):
        remark("inputs of quantized layers are float here; an artifact on a CPU rounds them to int8")
