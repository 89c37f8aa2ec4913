"""Accuracy against bit-width: several models, each at several widths by several methods, on the same windows of text.

variants.py defines what can be compared, measure.py runs it, and metrics.py computes metrics and intervals. This file
turns the measurements into a comparison: each variant against its own 16-bit model, and every model against the first,
paired over the same windows. "16" is the checkpoint itself, computed in float32 and counted as two bytes per weight, as
it is usually stored.

The result of rounding depends partly on chance: another calibration sample or order of channels gives another model.
`repeats` measures several roundings, and every interval includes their spread. Without repeats, intervals and verdicts
hold only for the one rounding that was measured. Several training runs of a model can be measured as one.

A checkpoint that is already quantized, such as one trained in low bits, is measured as it is: it has no variants, and
its loss against a float model is unknown. The same variants can also be tested on finding needles (retrieval.py).
Artifacts are measured on ONNX Runtime, together with the float checkpoint that they were made from.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...calib_data import NeedleWindows, Windows
from ...io import files
from ...models import Checkpoint, num_parameters
from ...quantize import load, parse_recipe, read_scheme
from ...runtime import Artifact
from .checks import artifacts_of, check_tokenizers, check_windows, in_groups, model_names
from .cost import Cost
from .measure import Measurement, Setup, Skipped, combine, measure
from .metrics import CONFIDENCE, Estimate, established, mean, paired, perplexity_ratio, recovered
from .retrieval import Retrieval, contrast, label, retrieval, settings
from .variants import BITS, CACHED, FLOAT, METHODS, NO_METHOD, RTN, UNCHANGED, WHAT, Key, Variant, variants


@dataclass(frozen=True)
class Result:
    """One model at one width. All intervals except `perplexity`'s are of paired differences to the 16-bit model."""

    model: str
    what: str  # one of WHAT, or "artifact"; "none" for the checkpoint as it is, float or quantized
    format: str
    method: str  # "none" unless weights are rounded
    bits: float
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    nbytes: int  # of the weights in a float16 artifact
    perplexity: Estimate
    ratio: Estimate  # of perplexities, to the 16-bit model's: 1.02 is 2 % worse
    kl: Estimate  # nats a token, from the 16-bit model
    agreement: Estimate  # share of tokens with the same most likely prediction
    recovered: Estimate | None  # share of rtn's loss that is avoided; None: rtn itself, not compared, or no loss
    cache_bytes: float  # of the KV cache, per token of context
    cost: Cost  # of a decoded token, at the windows' length
    retrieval: tuple[Retrieval, ...]  # one for each set of needles
    repeats: int  # number of roundings measured, of each training run; 1 also if nothing is rounded


@dataclass(frozen=True)
class Contrast:
    """Whether one model loses more at a width than another: paired, on the same windows."""

    model: str
    against: str
    what: str
    format: str
    method: str
    difference: Estimate  # log(ratio of `model`) - log(ratio of `against`), nats per token: below 0, `model` loses less
    retrieval: tuple[Estimate, ...]  # change of `model` - change of `against`, of needles: above 0, `model` loses less
    repeats: int | None  # roundings of each model, or of each of its runs; None: no weights are rounded
    runs: int  # training runs of each model


@dataclass(frozen=True)
class ModelInfo:
    name: str
    path: str
    sha256: str
    attention: str
    parameters: int
    layers: int
    hidden_size: int
    other_runs: dict[str, str]  # {path: SHA-256} of further training runs


@dataclass(frozen=True)
class Comparison:
    models: tuple[ModelInfo, ...]
    results: tuple[Result, ...]  # model by model, the 16-bit model first
    contrasts: tuple[Contrast, ...]  # every further model against the first
    confidence: float
    text: dict[str, Any]  # source, sha256, windows, length, scored_tokens
    calibration: dict[str, Any] | None  # source, sha256, windows, length, tokens (of the first sample), samples
    skipped: tuple[Skipped, ...]
    needles: tuple[dict[str, Any], ...]  # length, needles, queries, rows, source, sha256 of each set
    arithmetic: str  # of quantized linear layers, one of measure.ARITHMETICS

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, which plots.py and report.py take."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per result. "MB moved" and "M ops t/i/f" (millions of operations with ternary, integer and float
        weights; cost.py) are per decoded token."""
        several = any(result.method not in (NO_METHOD, RTN) for result in self.results)
        compared = {result.what for result in self.results}
        rows: list[dict[str, Any]] = []
        for result in self.results:
            unchanged = result.what == UNCHANGED
            row: dict[str, Any] = {"model": result.model, "what": "-" if unchanged else result.what}
            row["format"] = result.format
            if several:
                row["method"] = "-" if result.method == NO_METHOD else result.method
            if "weights" in compared:
                row |= {"bits/weight": round(result.bits_per_weight, 2), "MB": round(result.nbytes / 1e6, 2)}
            if compared & set(CACHED):
                row["KV bytes/token"] = round(result.cache_bytes, 1)
            row["MB moved"] = round(result.cost.nbytes / 1e6, 2)
            row["M ops t/i/f"] = "/".join(f"{count / 1e6:.1f}" for count in result.cost.operations.values())
            row["perplexity"] = result.perplexity.value
            ratio, shown = result.ratio, not unchanged or result.format == FLOAT  # else there is no float model
            row["increase"] = f"{ratio.value - 1:+z.2%}" if shown else "-"
            row[f"{self.confidence:.0%}"] = f"{ratio.low - 1:+z.2%} to {ratio.high - 1:+z.2%}" if shown else "-"
            if several:
                row["of rtn's loss recovered"] = _share(result.recovered)
            row["KL"] = result.kl.value if shown else "-"
            row["agreement"] = f"{result.agreement.value:.2%}" if shown else "-"
            row |= {f"found, {label(one)}": _share_found(one.accuracy, one.change) for one in result.retrieval}
            rows.append(row)
        return rows

    def write_json(self, path: str | Path) -> None:
        files.write_json(path, self.to_dict())

    def write_csv(self, path: str | Path) -> None:
        """Write every result with the ends of its intervals, in full precision."""
        table = [_flat(result) for result in self.results]
        with files.write_atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)


def compare(
    paths: Sequence[str | Path],
    windows: Windows,
    bits: Sequence[str] = BITS,
    what: Sequence[str] = WHAT,
    methods: Sequence[str] = METHODS,
    *,
    calibration: Windows | Sequence[Windows] | None = None,
    repeats: int = 1,
    arithmetic: str = "artifact",
    artifacts: Sequence[Artifact] = (),
    names: Sequence[str] | None = None,
    runs: int = 1,
    batch_size: int = 8,
    confidence: float = CONFIDENCE,
    cache_bytes: int = 1 << 30,
    device: torch.device | str = "cpu",
    needles: Sequence[NeedleWindows] = (),
) -> Comparison:
    """Compare float checkpoints at several bit-widths, and quantized ones as they are, on the same windows of text.

    methods: recipes for rounding weights. calibration: windows of other text, for methods that calibrate; a sample for
    each repeat, or one for all. repeats: number of roundings of each variant with rounded weights. arithmetic:
    "artifact" or "float" (measure.py). artifacts: artifacts of the checkpoints, to measure on ONNX Runtime. names: of
    the models, for tables and plots; default: the folders' names. runs: training runs of each model, which follow one
    another in `paths` and are compared as one. batch_size: windows at a time. confidence: of the
    intervals. cache_bytes: memory for the 16-bit model's log-probabilities. needles: sets of rows with needles, to test
    every variant on. Raises DiffbitError if models, windows or names do not fit together.
    """
    chosen = variants(bits, what, methods)
    samples = [calibration] if isinstance(calibration, Windows) else list(calibration or ())
    setup = Setup(windows, samples, needles, repeats, arithmetic, batch_size, cache_bytes)
    checkpoints = [Checkpoint(path) for path in paths]
    groups = in_groups(checkpoints, runs)
    names = model_names([group[0] for group in groups], names)
    for checkpoint in checkpoints:
        for text in (windows, *samples, *(rows.windows for rows in needles)):
            check_windows(checkpoint, text)
    check_tokenizers(checkpoints)
    by_path = artifacts_of(checkpoints, artifacts, windows)

    measurements: dict[str, list[Measurement]] = {}
    skipped: dict[Skipped, None] = {}  # each once, even if several runs of a model share it
    for name, group in zip(names, groups, strict=True):
        of_runs = []
        for run, checkpoint in enumerate(group, 1):
            title = name if len(group) == 1 else f"{name}, run {run} of {len(group)}"
            one, left_out = _measure(checkpoint, chosen, setup, title, by_path.get(checkpoint.path, ()), device)
            of_runs.append(one)
            skipped |= dict.fromkeys(replace(variant, model=name) for variant in left_out)
        measurements[name] = combine(of_runs)
    if not any(parse_recipe(method).calibrated for method in methods):
        setup = replace(setup, calibration=())
    return conclude(groups, measurements, tuple(skipped), setup, confidence)


def _measure(
    checkpoint: Checkpoint,
    chosen: Sequence[Variant],
    setup: Setup,
    name: str,
    artifacts: Sequence[Artifact],
    device: torch.device | str,
) -> tuple[list[Measurement], list[Skipped]]:
    """Measure a checkpoint; its model is gone afterwards."""
    scheme = read_scheme(checkpoint)
    try:
        model = load(checkpoint, device=device)
        return measure(model, chosen if scheme is None else (), setup, name=name, stored=scheme, artifacts=artifacts)
    finally:
        gc.collect()  # module hooks are reference cycles


def conclude(
    groups: Sequence[Sequence[Checkpoint]],
    measurements: Mapping[str, Sequence[Measurement]],
    skipped: Sequence[Skipped],
    setup: Setup,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Turn the measurements of each model, by name and with the unchanged model first, into a comparison.

    groups: the training runs of each model, mostly one.
    """
    results: list[Result] = []
    contrasts: list[Contrast] = []
    models: list[ModelInfo] = []
    by_key = {name: {one.variant.key: one for one in measured} for name, measured in measurements.items()}
    first = next(iter(by_key))
    for (checkpoint, *others), (name, measured) in zip(groups, by_key.items(), strict=True):
        config = checkpoint.config
        size = num_parameters(config), config.num_layers, config.hidden_size
        runs = {str(other.path): other.sha256() for other in others}
        models.append(ModelInfo(name, str(checkpoint.path), checkpoint.sha256(), config.attention, *size, runs))
        results += [_result(name, one, measured, setup, confidence) for one in measured.values()]
        if name != first:
            contrasts += _contrasts(name, measured, first, by_key[first], confidence, len(groups[0]))
    calibration = None
    if setup.calibration:
        sample = setup.calibration[0]
        calibration = _about(sample) | {"tokens": int(sample.mask.sum()), "samples": len(setup.calibration)}
    return Comparison(
        models=tuple(models),
        results=tuple(results),
        contrasts=tuple(contrasts),
        confidence=confidence,
        text=_about(setup.windows) | {"scored_tokens": setup.windows.scored},
        calibration=calibration,
        skipped=tuple(skipped),
        needles=tuple(settings(setup.needles)),
        arithmetic=setup.arithmetic,
    )


def _result(
    name: str, one: Measurement, measured: Mapping[Key, Measurement], setup: Setup, confidence: float
) -> Result:
    """measured: all measurements of the model, the unchanged one first."""
    variant, scores, whole = one.variant, one.scores, next(iter(measured.values()))
    rounded = None if variant.method == RTN else measured.get((variant.what, variant.format, RTN))
    sets = zip(setup.needles, one.answers, whole.answers, strict=bool(one.answers))
    return Result(
        model=name,
        what=variant.what,
        format=variant.format,
        method=variant.method,
        bits=variant.bits,
        bits_per_weight=one.bits_per_weight,
        nbytes=one.nbytes,
        perplexity=scores.perplexity(confidence),
        ratio=perplexity_ratio(scores, whole.scores, confidence),
        kl=scores.divergence(confidence),
        agreement=scores.agreement(confidence),
        recovered=None if rounded is None else recovered(scores, rounded.scores, whole.scores, confidence),
        cache_bytes=one.cache_bytes,
        cost=one.cost,
        retrieval=tuple(retrieval(needles, answers, exact, confidence) for needles, answers, exact in sets),
        repeats=one.repeats,
    )


def _contrasts(
    name: str,
    measured: Mapping[Key, Measurement],
    first: str,
    of_first: Mapping[Key, Measurement],
    confidence: float,
    runs: int,
) -> list[Contrast]:
    """Compare the variants that both models have with the first model's."""
    whole, first_whole, contrasts = next(iter(measured.values())), next(iter(of_first.values())), []
    for key, low in measured.items():
        other = of_first.get(key)
        if low.variant.what == UNCHANGED or other is None:
            continue
        lost = paired(low.scores, whole.scores) - paired(other.scores, first_whole.scores)
        sets = zip(low.answers, whole.answers, other.answers, first_whole.answers, strict=True)
        changes = tuple(contrast((a, b), (c, d), confidence) for a, b, c, d in sets)
        repeats = low.repeats if low.variant.rounds else None
        difference = mean(lost, whole.scores.tokens, confidence, whole.scores.document)
        contrasts.append(Contrast(name, first, *key, difference, changes, repeats, runs))
    return contrasts


def _about(windows: Windows) -> dict[str, Any]:
    count, length = windows.ids.shape
    return {"source": windows.source, "sha256": windows.sha256, "windows": count, "length": length}


def _flat(result: Result) -> dict[str, Any]:
    """Return a result as columns of a CSV file."""
    row = asdict(result)
    cost, needles = row.pop("cost"), row.pop("retrieval")
    row |= {f"token_{part}": number for part, number in cost.items()}
    for one in needles:
        name = f"retrieval_{one['needles']}_{one['queries']}_{one['length']}"
        row |= {name: one["accuracy"], f"{name}_change": one["change"]}
    row["recovered"] = row["recovered"] or dict.fromkeys(("value", "low", "high"), "")
    columns: dict[str, Any] = {}
    for name, value in row.items():
        estimate = value if isinstance(value, dict) else {"value": value}
        columns |= {name if end == "value" else f"{name}_{end}": number for end, number in estimate.items()}
    return columns


def _share_found(value: Estimate, change: Estimate) -> str:
    """Format a share, such as that of queries answered, and its change with the interval in percentage points."""
    points = (f"{100 * end:+z.1f}" for end in (change.value, change.low, change.high))
    return f"{value.value:.1%} ({next(points)}; {next(points)} to {next(points)})"


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if not established(*astuple(estimate)):
        return "not established"
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"
