"""Accuracy against bit-width: several models, each at several widths by several methods, on the same windows of text.

variants.py defines what can be compared, measure.py runs it, and metrics.py computes metrics and intervals. This file
turns the measurements into a comparison: each variant against its own 16-bit model, and every model against the first,
paired over the same windows. "16" is the checkpoint itself, computed in float32 and counted as two bytes per weight, as
it is usually stored.

The result of rounding depends partly on chance: another calibration sample or order of channels gives another model.
`repeats` measures several roundings, and every interval includes their spread. Without repeats, intervals and verdicts
hold only for the one rounding that was measured. Several training runs of a model can be measured as one (runs.py).

A checkpoint that is already quantized, such as one trained in low bits, is measured as it is: it has no variants, and
its loss against a float model is unknown. The same variants can also be tested on finding needles (retrieval.py).
Artifacts are measured on ONNX Runtime, together with the float checkpoint that they were made from.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...calib_data import NeedleWindows, Windows
from ...io import files
from ...io.errors import DiffbitError
from ...models import Checkpoint, ModelConfig, num_parameters
from ...quantize import AttentionScheme, load, parse_recipe, read_scheme
from ...quantize.cache import cache_spec
from ...runtime import Artifact
from .checks import check_tokenizers, check_windows, model_names, owned_artifacts
from .cost import Cost
from .measure import Measured, Refusal, measure
from .metrics import CONFIDENCE, Estimate, mean, paired, perplexity_ratio, recovered
from .retrieval import Retrieval, contrast, label, retrieval, settings
from .runs import in_groups, measure_runs
from .variants import ATTENTION, BITS, FLOAT, METHODS, NO_METHOD, WHAT, bits_of, variants

RTN = "rtn"  # rounding to nearest, the baseline of `recovered`
Key = tuple[str, str, str] | None  # of a variant; None: the unchanged checkpoint


@dataclass(frozen=True)
class Result:
    """One model at one width. All intervals except `perplexity`'s are of paired differences to the 16-bit model."""

    model: str
    what: str  # one of WHAT, or "artifact"; "none" for the 16-bit model itself, or a quantized checkpoint
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
    calibration: (
        dict[str, Any] | None
    )  # source, sha256, windows, length, tokens (of the first sample), samples; or None
    refused: tuple[Refusal, ...]
    needles: tuple[dict[str, Any], ...]  # length, needles, queries, rows, source, sha256 of each set
    arithmetic: str  # of quantized linear layers, one of measure.ARITHMETICS

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, which plots.py and report.py take."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per result. "MB moved" and "M ops t/i/f" (millions of operations with ternary, integer and float
        weights; cost.py) are per decoded token."""
        percent = f"{self.confidence:.0%}"
        several = any(result.method not in (NO_METHOD, RTN) for result in self.results)
        compared = {result.what for result in self.results}
        weights, cache = "weights" in compared, compared & set(ATTENTION)
        rows = []
        for result in self.results:
            stored = result.what == "none" and result.format != FLOAT  # already quantized: has no float model
            ratio = result.ratio
            rows.append(
                {
                    "model": result.model,
                    "what": "-" if result.what == "none" else result.what,
                    "format": result.format,
                    **({"method": "-" if result.method == NO_METHOD else result.method} if several else {}),
                    **({"bits/weight": round(result.bits_per_weight, 2)} if weights else {}),
                    **({"MB": round(result.nbytes / 1e6, 2)} if weights else {}),
                    **({"KV bytes/token": round(result.cache_bytes, 1)} if cache else {}),
                    "MB moved": round(result.cost.nbytes / 1e6, 2),
                    "M ops t/i/f": "/".join(f"{count / 1e6:.1f}" for count in result.cost.operations.values()),
                    "perplexity": result.perplexity.value,
                    "increase": "-" if stored else f"{ratio.value - 1:+z.2%}",
                    percent: "-" if stored else f"{ratio.low - 1:+z.2%} to {ratio.high - 1:+z.2%}",
                    **({"of rtn's loss recovered": _share(result.recovered)} if several else {}),
                    "KL": "-" if stored else result.kl.value,
                    "agreement": "-" if stored else f"{result.agreement.value:.2%}",
                    **{f"found, {label(one)}": _share_found(one.accuracy, one.change) for one in result.retrieval},
                }
            )
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
    """Compare float checkpoints at several bit-widths, and quantized ones unchanged, on windows of their shared
    tokenizer.

    methods: recipes for rounding weights. calibration: windows of other text, for methods that calibrate; a sample for
    each repeat, or one for all. repeats: number of roundings of each variant with rounded weights. arithmetic:
    "artifact" or "float" (measure.py). artifacts: artifacts of the checkpoints, to measure on ONNX Runtime. names: of
    the models, for tables and plots; default: the folders' names. runs: training runs of each model, which follow one
    another in `paths` and are compared as one. batch_size: windows at a time. confidence: of the
    intervals. cache_bytes: memory for the 16-bit model's log-probabilities. needles: sets of rows with needles, to test
    every variant on. Raises DiffbitError if models, windows or names do not fit together.
    """
    chosen = variants(bits, what, methods)
    if len(windows.ids) < 2:
        raise DiffbitError("the text fills one window, and an interval needs two: give more text, or shorter windows")
    if any(len(one.starts) < 2 for one in needles):
        raise DiffbitError("needles in one row give no interval; ask for two rows or more")
    checkpoints = [Checkpoint(path) for path in paths]
    groups = in_groups(checkpoints, runs)
    names = model_names([group[0] for group in groups], names)
    samples = [calibration] if isinstance(calibration, Windows) else list(calibration or ())
    for checkpoint in checkpoints:
        for text in (windows, *samples, *(one.windows for one in needles)):
            check_windows(checkpoint, text)
    check_tokenizers(checkpoints)
    owned = owned_artifacts(checkpoints, artifacts, windows)

    measured: dict[str, list[Measured]] = {}
    refused: list[Refusal] = []
    for name, group in zip(names, groups, strict=True):

        def run(checkpoint: Checkpoint, label: str) -> tuple[list[Measured], list[Refusal]]:
            scheme = read_scheme(checkpoint)
            return measure(
                load(checkpoint, device=device),
                chosen if scheme is None else (),
                windows,
                samples,
                name=label,
                repeats=repeats,
                arithmetic=arithmetic,
                batch_size=batch_size,
                cache_bytes=cache_bytes,
                needles=needles,
                stored=scheme,
                artifacts=owned.get(checkpoint.path, ()),
            )

        measured[name], refusals = measure_runs(name, group, run)
        refused += refusals
    if not any(parse_recipe(method).calibrated for method in methods):
        samples = []
    return conclude(groups, measured, refused, windows, samples, confidence, needles, arithmetic)


def conclude(
    groups: Sequence[Sequence[Checkpoint]],
    measured: Mapping[str, Sequence[Measured]],
    refused: Sequence[Refusal],
    windows: Windows,
    calibration: Sequence[Windows],
    confidence: float = CONFIDENCE,
    needles: Sequence[NeedleWindows] = (),
    arithmetic: str = "artifact",
) -> Comparison:
    """Turn the measurements of each model, by name and with the 16-bit model first, into a comparison.

    groups: the training runs of each model, mostly one.
    """
    results: list[Result] = []
    contrasts: list[Contrast] = []
    models: list[ModelInfo] = []
    by_key: dict[str, dict[Key, Measured]] = {
        name: {one.variant.key if one.variant else None: one for one in found} for name, found in measured.items()
    }
    first = next(iter(by_key))
    for (checkpoint, *others), (name, own) in zip(groups, by_key.items(), strict=True):
        config = checkpoint.config
        size = num_parameters(config), config.num_layers, config.hidden_size
        runs = {str(other.path): other.sha256() for other in others}
        models.append(ModelInfo(name, str(checkpoint.path), checkpoint.sha256(), config.attention, *size, runs))
        results += [_result(name, config, one, own, confidence, needles) for one in measured[name]]
        if name != first:
            contrasts += _contrasts(name, own, first, by_key[first], confidence, len(groups[0]))
    calibrated = None
    if calibration:
        tokens = int(calibration[0].mask.sum())
        calibrated = _about(calibration[0]) | {"tokens": tokens, "samples": len(calibration)}
    return Comparison(
        models=tuple(models),
        results=tuple(results),
        contrasts=tuple(contrasts),
        confidence=confidence,
        text=_about(windows) | {"scored_tokens": windows.scored},
        calibration=calibrated,
        refused=tuple(refused),
        needles=tuple(settings(needles)),
        arithmetic=arithmetic,
    )


def _result(
    name: str,
    config: ModelConfig,
    measured: Measured,
    own: Mapping[Key, Measured],
    confidence: float,
    needles: Sequence[NeedleWindows],
) -> Result:
    """own: all measurements of the model, by key."""
    variant, scores, reference = measured.variant, measured.scores, own[None].scores
    stored = None if measured.scheme is None else measured.scheme.weights
    attention = AttentionScheme() if measured.scheme is None else measured.scheme.attention
    rounded = None
    if variant is not None and variant.method != RTN:
        rounded = own.get((variant.what, variant.format, RTN))
    return Result(
        model=name,
        what="none" if variant is None else variant.what,
        format=variant.format if variant else stored.name if stored else FLOAT,
        method=NO_METHOD if variant is None else variant.method,
        bits=variant.bits if variant else bits_of(stored) if stored else 16.0,
        bits_per_weight=measured.bits_per_weight,
        nbytes=measured.nbytes,
        perplexity=scores.perplexity(confidence),
        ratio=perplexity_ratio(scores, reference, confidence),
        kl=scores.divergence(confidence),
        agreement=scores.agreement(confidence),
        recovered=None if rounded is None else recovered(scores, rounded.scores, reference, confidence),
        cache_bytes=cache_spec(config, attention, "float16").bytes_per_1k_tokens / 1000,
        cost=measured.cost,
        retrieval=tuple(
            retrieval(one, answers, whole, confidence)
            for one, answers, whole in zip(needles, measured.answers, own[None].answers, strict=bool(measured.answers))
        ),
        repeats=measured.repeats,
    )


def _contrasts(
    name: str, own: Mapping[Key, Measured], first: str, of_first: Mapping[Key, Measured], confidence: float, runs: int
) -> list[Contrast]:
    """Compare the variants that both models have with the first model's."""
    whole, first_whole, contrasts = own[None], of_first[None], []
    for key, low in own.items():
        other = of_first.get(key)
        if key is None or other is None:
            continue
        lost = paired(low.scores, whole.scores) - paired(other.scores, first_whole.scores)
        answers = zip(low.answers, whole.answers, other.answers, first_whole.answers, strict=True)
        found = tuple(contrast((a, b), (c, d), confidence) for a, b, c, d in answers)
        assert low.variant is not None
        repeats = low.repeats if low.variant.rounds else None
        difference = mean(lost, whole.scores.tokens, confidence, whole.scores.document)
        contrasts.append(Contrast(name, first, *key, difference, found, repeats, runs))
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
    if estimate.high - estimate.low > abs(estimate.value):
        return "not established"
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"
