"""Accuracy against bit-width: several models, each at several widths by several methods, on the same windows of text.

variants.py defines what can be compared, measure.py runs it, and metrics.py computes metrics and intervals. This file
turns the measurements into a comparison: each variant against its own 16-bit model, and every model against the first,
paired over the same windows. "16" is the checkpoint itself, computed in float32 and counted as two bytes per weight, as
it is usually stored.

Intervals and verdicts hold only for the roundings and training runs that were measured: for the one rounding without
`repeats`, for the one run without `runs`. A checkpoint that is already quantized is measured as it is: it has no
variants, and its loss against a float model is unknown. Artifacts are measured on ONNX Runtime, together with the float
checkpoint that they were made from.
"""

from __future__ import annotations

import csv
import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...calib_data import NeedleWindows, Windows
from ...io import files
from ...models import Checkpoint, num_parameters
from ...quantize import load, read_scheme
from ...quantize.methods import parse_recipe
from ...runtime import Artifact
from .checks import artifacts_of, check_tokenizers, check_windows, in_groups, model_names
from .cost import Cost
from .measure import Measurement, Setup, Skipped, combine, measure
from .metrics import CONFIDENCE, Estimate, established, paired, perplexity_ratio, recovered
from .retrieval import Retrieval, gained, retrieval, setting, share
from .variants import BITS, CACHED, FLOAT, METHODS, NO_METHOD, RTN, UNCHANGED, WHAT, Key, variants

ByKey = Mapping[Key, Measurement]  # all measurements of a model, the unchanged one first


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

    @classmethod
    def of(cls, name: str, group: Sequence[Checkpoint]) -> ModelInfo:
        first, *others = group
        config, runs = first.config, {str(other.path): other.sha256() for other in others}
        size = num_parameters(config), config.num_layers, config.hidden_size
        return cls(name, str(first.path), first.sha256(), config.attention, *size, runs)


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
            ratio, what = result.ratio, "-" if result.what == UNCHANGED else result.what
            shown = what != "-" or result.format == FLOAT  # else it is quantized, and has no float model
            row: dict[str, Any] = {"model": result.model, "what": what, "format": result.format}
            rows.append(row)
            if several:
                row["method"] = "-" if result.method == NO_METHOD else result.method
            if "weights" in compared:
                row |= {"bits/weight": round(result.bits_per_weight, 2), "MB": round(result.nbytes / 1e6, 2)}
            if compared & set(CACHED):
                row["KV bytes/token"] = round(result.cache_bytes, 1)
            row["MB moved"] = round(result.cost.nbytes / 1e6, 2)
            row["M ops t/i/f"] = "/".join(f"{count / 1e6:.1f}" for count in result.cost.operations.values())
            row["perplexity"] = result.perplexity.value
            row["increase"] = f"{ratio.value - 1:+z.2%}" if shown else "-"
            row[f"{self.confidence:.0%}"] = f"{ratio.low - 1:+z.2%} to {ratio.high - 1:+z.2%}" if shown else "-"
            if several:
                row["of rtn's loss recovered"] = _share(result.recovered)
            row["KL"] = result.kl.value if shown else None
            row["agreement"] = f"{result.agreement.value:.2%}" if shown else "-"
            for one in result.retrieval:
                row[f"found, {one.needles}:{one.queries} of {one.length}"] = _share_found(one.accuracy, one.change)
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
    the models; default: the folders' names. runs: training runs of each model, which follow one another in `paths` and
    are compared as one. batch_size: windows at a time. confidence: of the intervals. cache_bytes: memory for the 16-bit
    model's log-probabilities. needles: sets of rows with needles, to test every variant on. Raises DiffbitError if
    models, windows or names do not fit together.
    """
    chosen = variants(bits, what, methods)
    samples = [calibration] if isinstance(calibration, Windows) else list(calibration or ())
    setup = Setup(windows, samples, needles, repeats, arithmetic, confidence, batch_size, cache_bytes)
    checkpoints = [Checkpoint(path) for path in paths]
    groups = in_groups(checkpoints, runs)
    names = model_names([group[0] for group in groups], names)
    for checkpoint in checkpoints:
        for text in (windows, *samples, *(rows.windows for rows in needles)):
            check_windows(checkpoint.path, checkpoint.config.vocab_size, checkpoint.config.max_position, text)
    check_tokenizers(checkpoints)
    by_path = artifacts_of(checkpoints, artifacts, windows)

    measurements: dict[str, list[Measurement]] = {}
    skipped: dict[Skipped, None] = {}  # each once, even if several runs of a model share it
    for name, group in zip(names, groups, strict=True):
        by_run = []
        for run, checkpoint in enumerate(group, 1):
            gc.collect()  # the model before this one; module hooks are reference cycles
            scheme = read_scheme(checkpoint)
            title = name if len(group) == 1 else f"{name}, run {run} of {len(group)}"
            measured, left_out = measure(
                load(checkpoint, device=device), chosen if scheme is None else (), setup, name=title, stored=scheme,
                artifacts=by_path.get(checkpoint.path, ()),
            )  # fmt: skip
            by_run.append(measured)
            skipped |= dict.fromkeys(replace(variant, model=name) for variant in left_out)
        measurements[name] = combine(by_run)
    if not any(parse_recipe(method).calibrated for method in methods):
        setup = replace(setup, calibration=())
    return conclude(groups, measurements, tuple(skipped), setup)


def conclude(
    groups: Sequence[Sequence[Checkpoint]],
    measurements: Mapping[str, Sequence[Measurement]],
    skipped: Sequence[Skipped],
    setup: Setup,
) -> Comparison:
    """Turn the measurements of each model, by name and with the unchanged model first, into a comparison.

    groups: the training runs of each model, mostly one.
    """
    by_key = {name: {one.variant.key: one for one in measured} for name, measured in measurements.items()}
    first, *others = by_key
    contrasts = [_contrasts(name, by_key[name], first, by_key[first], setup, len(groups[0])) for name in others]
    samples = setup.calibration
    calibration = (
        _about(samples[0]) | {"tokens": int(samples[0].mask.sum()), "samples": len(samples)} if samples else None
    )
    return Comparison(
        models=tuple(ModelInfo.of(name, group) for name, group in zip(by_key, groups, strict=True)),
        results=tuple(_result(name, one, by_key[name], setup) for name in by_key for one in by_key[name].values()),
        contrasts=tuple(itertools.chain.from_iterable(contrasts)),
        confidence=setup.confidence,
        text=_about(setup.windows) | {"scored_tokens": setup.windows.scored},
        calibration=calibration,
        skipped=tuple(skipped),
        needles=tuple(map(setting, setup.needles)),
        arithmetic=setup.arithmetic,
    )


def _result(name: str, one: Measurement, measured: ByKey, setup: Setup) -> Result:
    variant, scores, whole = one.variant, one.scores, next(iter(measured.values()))
    rounded = None if variant.method == RTN else measured.get((variant.what, variant.format, RTN))
    sets = zip(setup.needles, one.answers, whole.answers, strict=bool(one.answers))
    return Result(
        name, *variant.key, variant.bits, one.bits_per_weight, one.nbytes,
        perplexity=scores.perplexity(setup.confidence),
        ratio=perplexity_ratio(scores, whole.scores, setup.confidence),
        kl=scores.divergence(setup.confidence),
        agreement=scores.agreement(setup.confidence),
        recovered=None if rounded is None else recovered(scores, rounded.scores, whole.scores, setup.confidence),
        cache_bytes=one.cache_bytes, cost=one.cost, repeats=one.repeats,
        retrieval=tuple(retrieval(*needles, setup.confidence) for needles in sets),
    )  # fmt: skip


def _contrasts(name: str, measured: ByKey, first: str, of_first: ByKey, setup: Setup, runs: int) -> list[Contrast]:
    """Compare the variants that both models have with the first model's."""
    whole, first_whole, contrasts = next(iter(measured.values())), next(iter(of_first.values())), []
    for key, low in measured.items():
        other = of_first.get(key)
        if low.variant.what == UNCHANGED or other is None:
            continue
        lost = paired(low.scores, whole.scores) - paired(other.scores, first_whole.scores)
        difference = whole.scores.mean(lost, setup.confidence)
        sets = zip(low.answers, whole.answers, other.answers, first_whole.answers, strict=True)
        gains = ((gained(a, b) - gained(c, d), a.shape[-1]) for a, b, c, d in sets)
        changes = tuple(share(gain, queries, setup.confidence) for gain, queries in gains)
        repeats = low.repeats if low.variant.rounds else None
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
    points = (f"{100 * end:+z.1f}" for end in astuple(change))
    return f"{value.value:.1%} ({next(points)}; {next(points)} to {next(points)})"


def _share(estimate: Estimate | None) -> str:
    if estimate is None or not established(*astuple(estimate)):
        return "-" if estimate is None else "not established"
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"
