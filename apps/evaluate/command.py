"""diffbit compare: measure accuracy against bit-width."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
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
from ...io.files import locked, read_json
from ...settings import CALIBRATION_WINDOWS
from .words import pair_verdict, plain, verdict

if TYPE_CHECKING:
    from ...calib_data import NeedleWindows
    from ...runtime import Artifact
    from .compare import Comparison, Pair
    from .given import Model

EXAMPLES = {
    "compare": (
        "diffbit compare out/demo/diff_v1 out/demo/diff_v1-int4 out/demo/diff_v1-onnx",
        "diffbit compare out/demo/diff_v1 out/demo/diff_v1-int4 --data text.txt -o out/comparison",
        "diffbit compare out/demo/diff_v1 out/demo/softmax --bits 16,8,4,3,2 -o out/comparison",
        "diffbit compare out/demo/diff_v1 --what weights --bits 16,int4_g32,nf4 --max-windows 16",
        "diffbit compare examples/pico/diff_v1 --what weights --bits 4,3 --method rtn,gptq --repeats 5 --max-windows 8",
        "diffbit compare examples/pico/diff_v1 --what kv,qk --bits 16,8,4,2 --max-windows 16",
    ),
}
BITS, SWEPT = "16,8,6,4,3,2,ternary", "weights,logits"  # defaults of --bits and --what
MOST_PAIRED = 4  # quantized models, of which each two are compared in a sentence
FIRST = ("output", "data", "max_windows", "length", "bits", "what", "method", "as_json")  # options of --help

# fmt: off
Models = Annotated[list[Path], typer.Argument(
    help="Float models, and quantized checkpoints and artifacts that were made of them, in any order; with the same "
    "tokenizer."
)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for report.html, plots, JSON and CSV.")]
Bits = Annotated[str | None, typer.Option(
    metavar="FORMATS", help="Quantize the float models to these bit-widths or formats, such as 16,4,int4_g32,nf4. "
    f"Default: {BITS}; none of them if a quantized model is given."
)]
What = Annotated[str | None, typer.Option(
    metavar="WHAT", help="What --bits quantizes, separated by commas: weights, logits, probabilities, qk, kv, kv:0, "
    f"keys, values. Default: {SWEPT}."
)]
Methods = Annotated[str | None, typer.Option(
    metavar="METHODS", autocompletion=completion(lambda: plugins.names("diffbit.quantize.methods"), "+,"),
    help="Methods of --bits for the weights, separated by commas; each as for `diffbit quantize --method`. Default: "
    "rtn.",
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
    help="Artifact of one of the float models, in addition to --bits. Repeatable."
)]
Quantized = Annotated[list[Path] | None, typer.Option(
    help="Quantized checkpoint whose layer errors the report shows, and which is not measured. Repeatable."
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
    bits: Bits = None,
    what: What = None,
    method: Methods = None,
    calibrate: Calibrate = "mix",
    repeats: Repeats = 1,
    runs: Runs = 1,
    arithmetic: Kind = "artifact",
    data: Data = "mix",
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
    """Measure what low bits cost: KL divergence, top-token agreement and perplexity, with 95 % intervals.

    Give a float model and the quantized checkpoints and artifacts that were made from it: each is compared with the
    float model, and with the others. Float models alone are quantized to several formats.

    All are measured on the same text, and their differences are paired. Attention can be quantized too: its logits
    and probabilities (the softmax maps) at any number of bits, qk (integer products of queries and keys) at 8 or 4, and
    kv (the KV cache; kv:0 without tokens in float16), or keys and values alone, at 8, 4, 3 or 2.
    """
    from ...calib_data import samples
    from ...quantize.methods import parse_recipe
    from ...runtime import Artifact
    from .compare import compare as compare_models
    from .given import check_floats, open_models

    floats, given = open_models(models)
    check_floats(floats, given, alone=bits == "16")
    artifacts = _check_places(output, artifact or (), quantized or ())
    opened = [*floats, *given, *artifacts]
    first = opened[0].path  # its tokenizer reads the text
    is_swept = bits is not None or what is not None or method is not None or not given
    widths = (bits or BITS).split(",") if is_swept else None
    parts, methods = (what or SWEPT).split(","), (method or "rtn").split(",")
    with nullcontext() if output is None else locked(output):
        firsts = [model.path for model in floats[:: max(1, runs)]]
        recorded = _read_reports(firsts, given, artifacts, quantized or ())
        length = _window_length(opened, length)
        windows = read_windows(first, data, field, max_windows, length)
        needles = _needles([*floats, *given], retrieval or "", data, field, rows, seed)
        calibration = []
        if is_swept and "weights" in parts and any(parse_recipe(name).calibrated for name in methods):
            # the first sample is the one that `diffbit quantize` uses
            text = read_windows(first, calibrate, field, None, None, split="calib")
            calibration = samples(text, CALIBRATION_WINDOWS, repeats)
        comparison = compare_models(
            models, windows, widths, parts, methods, calibration=calibration, repeats=repeats,
            runs=runs, arithmetic=arithmetic, artifacts=artifacts, batch_size=batch_size, device=torch_device(device),
            needles=needles,
        )  # fmt: skip
        if output is not None:
            outliers = []
            if is_swept and firsts:
                options = ["--data", data, "--field", field, "--max-windows", str(max_windows), "--device", device]
                options += ["--length", str(length), "--plot", str(output / "outliers.svg")]
                outliers = json_of("outliers", *options, "--", *map(str, firsts))
                for report, model in zip(outliers, comparison.models, strict=True):
                    report["model"] = model.name
            names = {model.path: model.name for model in comparison.quantized}
            recorded["artifacts"] = [
                _artifact_row(model, names[str(model.path)]) for model in opened if isinstance(model, Artifact)
            ]
            _write(comparison, outliers, recorded, output)
        if as_json:
            print_json(comparison.to_dict())
            return
        print_table(comparison.rows(), "KL in nats per token from the float model; 95 % intervals in brackets")
        for pair in _pairs(comparison):
            print(plain(pair_verdict(asdict(pair))))
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


def _read_reports(
    firsts: Sequence[Path], given: Sequence[Model], artifacts: Sequence[Artifact], quantized: Sequence[Path]
) -> dict[str, Any]:
    """Return what `train` and `quantize` recorded about the models, by the names of ReportData's fields. quantized:
    folders that are not measured."""
    from ...quantize import REPORT_FILE
    from .given import row_names

    reports: dict[str, dict[str, Any]] = {"training": {}, "quantization": {}}
    measured = [*firsts, *(model.path for model in (*given, *artifacts))]
    names = [*row_names(measured), *row_names(quantized)]
    for folder, name in zip((*measured, *quantized), names, strict=True):
        for path, kind in ((folder / "training.json", "training"), (folder / REPORT_FILE, "quantization")):
            if not path.is_file():  # another program made the model
                continue
            try:
                values = read_json(path)
                entry = _training(values) if kind == "training" else {"weights": list(values["weights"])}
            except (KeyError, TypeError) as error:
                raise DiffbitError(f"{path}: is not as diffbit wrote it ({error}); restore or remove it") from None
            reports[kind][name] = entry
    return reports


def _training(run: dict[str, Any]) -> dict[str, Any]:
    config, result = run["config"], run["result"]
    rows = config["steps"] * config["batch_size"] * config["accumulate"] * run["processes"]
    return {"tokens": rows * config["length"], "training_s": result["seconds"], "eval_loss": result["eval_loss"]}


def _window_length(models: Sequence[Model], length: int | None) -> int:
    """Return the tokens of a window, which fits into the context of every model; length: as given with --length."""
    from ...runtime import Artifact

    contexts = {
        model.path: model.context_length if isinstance(model, Artifact) else model.config.max_position
        for model in models
    }
    path, context = min(contexts.items(), key=lambda item: item[1])
    if length is not None and length > context:
        raise DiffbitError(f"--length is {length} tokens, but the context of {path} is {context}")
    return min(context, 512) if length is None else length


def _needles(models: Sequence[Model], entries: str, data: str, field: str, rows: int, seed: int) -> list[NeedleWindows]:
    """Build texts with needles for every N:Q[:LENGTH], no longer than the shortest context among the checkpoints."""
    from ...calib_data import needle_windows
    from ...models import Checkpoint
    from .retrieval import parse_setting

    context = min(model.config.max_position for model in models if isinstance(model, Checkpoint))
    settings = [parse_setting(entry, context) for entry in entries.split(",")] if entries else []
    return [
        needle_windows(data, models[0].path, length, needles, queries, rows, field=field, seed=seed)
        for needles, queries, length in settings
    ]


def _artifact_row(opened: Artifact, name: str) -> dict[str, Any]:
    """Format, sizes and parts of an artifact, as ReportData's `artifacts` shows them."""
    from ...models import ModelConfig, num_parameters
    from .variants import on_a_device

    return {
        "name": name,
        "format": on_a_device(opened).format,
        "bytes": opened.nbytes,
        "source_bytes": 2 * num_parameters(ModelConfig.from_dict(dict(opened.model))),
        "parts": [asdict(part) for part in opened.parts],
    }


def _write(comparison: Comparison, outliers: list[dict[str, Any]], recorded: dict[str, Any], output: Path) -> None:
    """Write report.html, the plot, and the comparison as JSON and CSV. recorded: further fields of ReportData."""
    from .plots import plot_comparison, quantized, subjects
    from .report import ReportData, versions, write_report

    comparison.write_json(output / "comparison.json")
    comparison.write_csv(output / "comparison.csv")
    data, command = comparison.to_dict(), shlex.join(["diffbit", *sys.argv[1:]])
    if subjects(data) or quantized(data):  # else there are no bits to plot
        plot_comparison(data, output / "comparison.svg")
    title = "Accuracy against bit-width" if subjects(data) else "What low bits cost"
    report = ReportData(title, data, outliers, commands=[command], versions=versions(), **recorded)
    write_report(report, output / "report.html")


def _pairs(comparison: Comparison) -> list[Pair]:
    """Return the pairs to tell of: all, or those with the best if a float model has more than MOST_PAIRED."""
    counts = Counter(info.model for info in comparison.quantized)
    best = {
        model: min((r for r in comparison.results if r.model == model and r.name != model), key=lambda r: r.kl.value)
        for model in counts
    }
    return [
        pair
        for pair in comparison.pairs
        if counts[pair.model] <= MOST_PAIRED or best[pair.model].name in (pair.name, pair.against)
    ]


def _remarks(comparison: Comparison, several: bool) -> None:
    """Print which formats were skipped, and which model loses less. several: name the methods."""
    for info in comparison.quantized:
        if info.found_by == "other":
            remark(
                f"{info.path}: records another float model than {info.model}, which has its shape; it is compared with "
                "that one all the same"
            )
    if comparison.pairs:
        remark(
            "the intervals say what other text of this kind would change; another calibration sample or rounding may "
            "give another difference"
        )
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
