"""Accuracy against bit-width: several models, each at several widths by several methods, on the same windows of text.

variants.py defines what can be compared, measure.py runs it, and metrics.py computes metrics and intervals. This file
turns the measurements into a comparison: each variant against its own 16-bit model, and every model against the first,
paired over the same windows. "16" is the checkpoint itself, computed in float32 and counted as two bytes per weight, as
it is usually stored.

Intervals and verdicts hold only for the roundings and training runs that were measured: for the one rounding without
`repeats`, for the one run without `runs`. Quantized checkpoints and artifacts are measured as they are, against the
float model that they were made of (given.py), and each two of one float model are compared with each other.
"""

from __future__ import annotations

import csv
import gc
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...calib_data import NeedleWindows, Windows
from ...io import files
from ...io.errors import DiffbitError
from ...models import Checkpoint, num_parameters
from ...quantize import load, read_scheme
from ...quantize.methods import parse_recipe
from ...runtime import Artifact
from .checks import check_runs, check_tokenizers, check_windows, in_groups
from .cost import Cost
from .given import Quantized, check_floats, open_models, row_names, with_references
from .measure import Measurement, Setup, Skipped, combine, measure
from .metrics import CONFIDENCE, Estimate, paired, perplexity_ratio, recovered
from .retrieval import Retrieval, gained, retrieval, setting, share
from .tables import result_rows
from .variants import BITS, FLOAT, FOLDERS, METHODS, RTN, UNCHANGED, WHAT, Key, variants
from .words import number, plain


@dataclass(frozen=True)
class Result:
    """One model at one width, or one quantized checkpoint or artifact.

    All intervals except `perplexity`'s are of paired differences to the 16-bit model.
    """

    model: str
    name: str  # of the quantized checkpoint or artifact; else the model's
    what: str  # one of WHAT, or "checkpoint" or "artifact" as given; "none" for the model as it is
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
class Pair:
    """Whether one of two quantized checkpoints or artifacts of a model loses more: paired, on the same windows."""

    model: str  # the float one
    name: str
    against: str
    kl: Estimate  # KL of `name` - KL of `against`, nats per token: below 0, `name` loses less
    loss: Estimate  # the same of the negative log likelihood
    agreement: Estimate  # the same of the share of tokens with the float model's most likely prediction


@dataclass(frozen=True)
class QuantizedInfo:
    """A quantized checkpoint or artifact that was compared."""

    name: str
    path: str
    sha256: str  # of the checkpoint, or of the artifact's manifest
    what: str  # "checkpoint" or "artifact"
    model: str  # the float one
    found_by: str  # how that was found: "hash"; "shape": no hash is recorded; "other": that of another model is


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
    quantized: tuple[QuantizedInfo, ...]
    pairs: tuple[Pair, ...]  # each two of the quantized ones of a float model
    confidence: float
    text: dict[str, Any]  # source, sha256, windows, length, scored_tokens
    calibration: dict[str, Any] | None  # source, sha256, windows, length, tokens (of the first sample), samples
    skipped: tuple[Skipped, ...]
    needles: tuple[dict[str, Any], ...]  # length, needles, queries, rows, source, sha256 of each set
    arithmetic: str  # of quantized linear layers, one of measure.ARITHMETICS

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, which plots.py and report.py take."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per result, for a terminal: KL in nats per token, intervals in brackets, in ASCII."""
        comparison = self.to_dict()
        rows = result_rows(comparison, comparison["results"])
        return [
            {name: plain(number(cell)) if isinstance(cell, str | None) else cell for name, cell in row.items()}
            for row in rows
        ]

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
    bits: Sequence[str] | None = None,
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
    """Compare models on the same windows of text: float checkpoints, at several bit-widths, and the quantized
    checkpoints and artifacts that were made of them, as they are.

    paths: all of these, in any order; given.py finds the float model of each quantized one. bits: widths of the float
    models; default: BITS, and none if a quantized model is given. methods: recipes for rounding weights. calibration:
    windows of other text, for methods that calibrate; a sample for each repeat, or one for all. repeats: number of
    roundings of each variant with rounded weights. arithmetic: "artifact" or "float" (measure.py). artifacts: further
    ones. names: of the float models; default: the folders' names. runs: training runs of each float model, which follow
    one another in `paths` and are compared as one. batch_size: windows at a time. confidence: of the intervals.
    cache_bytes: memory for the 16-bit model's log-probabilities. needles: sets of rows with needles, to test every
    variant on. Raises DiffbitError if models, windows or names do not fit together.
    """
    floats, given = open_models(paths)
    asked_for = bits is not None
    if bits is None:
        bits = (FLOAT,) if given else BITS
    chosen = variants(bits, what, methods)
    samples = [calibration] if isinstance(calibration, Windows) else list(calibration or ())
    setup = Setup(windows, samples, needles, repeats, arithmetic, confidence, batch_size, cache_bytes)
    if not paths:
        raise DiffbitError("no model to compare; give one checkpoint folder or more")
    if given and runs > 1:
        raise DiffbitError(f"{given[0].path}: is quantized, and --runs takes float models; leave out one of the two")
    if not floats and not chosen:
        check_floats(floats, given, alone=asked_for)
        floats, given = [model for model in given if isinstance(model, Checkpoint)], []
    groups = in_groups(floats, runs)
    firsts = [group[0] for group in groups]
    if names is not None and len(names) != len(groups):
        raise DiffbitError(f"{len(names)} names for {len(groups)} models; give one each, or none")
    given = [*given, *artifacts]
    labels = row_names([model.path for model in (*firsts, *given)])
    quantized = with_references(given, labels[len(firsts) :], floats)
    labels = list(names or labels[: len(firsts)])
    if runs > 1:
        check_runs(quantized)
    for text in (windows, *samples, *(rows.windows for rows in needles)):
        for model in (*floats, *given):
            vocabulary = model.vocab_size if isinstance(model, Artifact) else model.config.vocab_size
            context = model.context_length if isinstance(model, Artifact) else model.config.max_position
            check_windows(model.path, vocabulary, context, text)
    check_tokenizers((*floats, *given))

    measurements: dict[str, list[Measurement]] = {}
    skipped: dict[Skipped, None] = {}  # each once, even if several runs of a model share it
    index = 0  # of the float checkpoint
    for name, group in zip(labels, groups, strict=True):
        by_run = []
        for run, checkpoint in enumerate(group, 1):
            gc.collect()  # the model before this one; module hooks are reference cycles
            scheme = read_scheme(checkpoint)
            title = name if len(group) == 1 else f"{name}, run {run} of {len(group)}"
            measured, left_out = measure(
                load(checkpoint, device=device), chosen if scheme is None else (), setup, name=title, stored=scheme,
                quantized=[entry for entry in quantized if entry.reference == index],
            )  # fmt: skip
            by_run.append(measured)
            skipped |= dict.fromkeys(replace(variant, model=name) for variant in left_out)
            index += 1
        measurements[name] = combine(by_run)
    if not any(parse_recipe(method).calibrated for method in methods):
        setup = replace(setup, calibration=())
    infos = [_info(entry, labels[entry.reference // runs]) for entry in quantized]
    return conclude(groups, measurements, tuple(skipped), setup, infos)


def conclude(
    groups: Sequence[Sequence[Checkpoint]],
    measurements: Mapping[str, Sequence[Measurement]],
    skipped: Sequence[Skipped],
    setup: Setup,
    quantized: Sequence[QuantizedInfo] = (),
) -> Comparison:
    """Turn the measurements of each model, by name and with the unchanged model first, into a comparison.

    groups: the training runs of each model, mostly one.
    """
    first, *others = measurements
    contrasts = [
        _contrasts(name, measurements[name], first, measurements[first], setup, len(groups[0])) for name in others
    ]
    samples = setup.calibration
    calibration = (
        _about(samples[0]) | {"tokens": int(samples[0].mask.sum()), "samples": len(samples)} if samples else None
    )
    return Comparison(
        models=tuple(ModelInfo.of(name, group) for name, group in zip(measurements, groups, strict=True)),
        results=tuple(_result(name, entry, ones, setup) for name, ones in measurements.items() for entry in ones),
        contrasts=tuple(itertools.chain.from_iterable(contrasts)),
        quantized=tuple(quantized),
        pairs=tuple(pair for name, ones in measurements.items() for pair in _pairs(name, ones, setup)),
        confidence=setup.confidence,
        text=_about(setup.windows) | {"scored_tokens": setup.windows.scored},
        calibration=calibration,
        skipped=tuple(skipped),
        needles=tuple(map(setting, setup.needles)),
        arithmetic=setup.arithmetic,
    )


def _info(quantized: Quantized, model: str) -> QuantizedInfo:
    path, variant = quantized.path, quantized.variant
    sha256 = quantized.model.sha256 if isinstance(quantized.model, Artifact) else quantized.model.sha256()
    return QuantizedInfo(variant.name, str(path), sha256, variant.what, model, quantized.found_by)


def _result(name: str, measurement: Measurement, measured: Sequence[Measurement], setup: Setup) -> Result:
    variant, scores, reference = measurement.variant, measurement.scores, measured[0]
    rounded = None if variant.method == RTN else _by_key(measured).get((variant.what, variant.format, RTN))
    sets = zip(setup.needles, measurement.answers, reference.answers, strict=bool(measurement.answers))
    return Result(
        name, variant.name or name, *variant.key, variant.bits, measurement.bits_per_weight, measurement.nbytes,
        perplexity=scores.perplexity(setup.confidence),
        ratio=perplexity_ratio(scores, reference.scores, setup.confidence),
        kl=scores.divergence(setup.confidence),
        agreement=scores.agreement(setup.confidence),
        recovered=None if rounded is None else recovered(scores, rounded.scores, reference.scores, setup.confidence),
        cache_bytes=measurement.cache_bytes, cost=measurement.cost, repeats=measurement.repeats,
        retrieval=tuple(retrieval(*needles, setup.confidence) for needles in sets),
    )  # fmt: skip


def _by_key(measured: Sequence[Measurement]) -> dict[Key, Measurement]:
    """Return the measurements of a model by what they are of, without folders that are alike in that."""
    counts = Counter(entry.variant.key for entry in measured)
    return {entry.variant.key: entry for entry in measured if counts[entry.variant.key] == 1}


def _contrasts(
    name: str, measured: Sequence[Measurement], first: str, of_first: Sequence[Measurement], setup: Setup, runs: int
) -> list[Contrast]:
    """Compare the variants that both models have with the first model's."""
    whole, first_whole, theirs, contrasts = measured[0], of_first[0], _by_key(of_first), []
    for key, low in _by_key(measured).items():
        other = theirs.get(key)
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


def _pairs(model: str, measured: Sequence[Measurement], setup: Setup) -> list[Pair]:
    """Compare each two of the quantized checkpoints and artifacts of a model."""
    folders = [entry for entry in measured if entry.variant.what in FOLDERS and entry.variant.name]
    pairs = []
    for against, entry in itertools.combinations(folders, 2):
        kl, loss, agreement = (
            entry.scores.mean(getattr(entry.scores, sums) - getattr(against.scores, sums), setup.confidence)
            for sums in ("kl", "nll", "agree")
        )
        pairs.append(Pair(model, entry.variant.name, against.variant.name, kl, loss, agreement))
    return pairs


def _about(windows: Windows) -> dict[str, Any]:
    count, length = windows.ids.shape
    return {"source": windows.source, "sha256": windows.sha256, "windows": count, "length": length}


def _flat(result: Result) -> dict[str, Any]:
    """Return a result as columns of a CSV file."""
    row = asdict(result)
    cost, needles = row.pop("cost"), row.pop("retrieval")
    row |= {f"token_{part}": number for part, number in cost.items()}
    for entry in needles:
        name = f"retrieval_{entry['needles']}_{entry['queries']}_{entry['length']}"
        row |= {name: entry["accuracy"], f"{name}_change": entry["change"]}
    row["recovered"] = row["recovered"] or dict.fromkeys(("value", "low", "high"), "")
    columns: dict[str, Any] = {}
    for name, value in row.items():
        estimate = value if isinstance(value, dict) else {"value": value}
        columns |= {name if end == "value" else f"{name}_{end}": number for end, number in estimate.items()}
    return columns
