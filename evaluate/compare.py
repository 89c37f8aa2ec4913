"""Accuracy against bit-width: several models, each at several widths by several methods, on the same windows of text.

For every model, every variant ("weights at int4_g64 by gptq", "attention logits at 4 bits", ...) is made in memory from
the float checkpoint and held against it, token by token: metrics.py says what is measured and how sure it is. "16" is
the checkpoint itself, computed in fp32, and counted as two bytes a weight, as it is usually stored.

A number of bits stands for a format: 8 for int8 (a scale per row), 7 to 2 for int7_g64 ... int2_g64; formats may also
be named: int4_g32, nf4, ternary. Attention logits take whole numbers only (dynamic absmax per query row, arXiv
2410.05258, Figure 8); named formats are left out there.

A method is a recipe of quantize/methods, such as "gptq" or "rotate+gptq"; those that calibrate do so on windows of
their own. Beside plain rounding ("rtn") each of the others also says which share of its loss it recovers.

Memory: the model, one quantized copy (which shares what is not quantized), and the 16-bit model's log-probabilities of
as many windows as fit into `cache_bytes`. Over the other windows the 16-bit model runs anew for each variant: a variant
may be slow to make, so it is made once.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files, models
from ..calib_data import Windows
from ..errors import DiffbitError
from ..models import Checkpoint, Decoder, ModelConfig, num_parameters
from ..progress import track
from ..quantize import AttentionScheme, Format, Scheme, apply, linear_shapes, parse_format, parse_recipe, sizes
from ..quantize.scheme import LOGIT_BITS
from .metrics import CONFIDENCE, Estimate, Scores, log_probabilities, mean, paired, perplexity_ratio, recovered, score

BITS = ("16", "8", "6", "4", "3", "2", "ternary")
WHAT = ("weights", "logits")
FLOAT = "16"
METHODS = ("rtn",)
ROUNDED = "rtn"  # the method whose loss the others recover
GROUP = 64  # of a format that is given as a number of bits below 8


@dataclass(frozen=True)
class Variant:
    """Something to compare with the 16-bit model."""

    what: str  # weights | logits
    format: str  # int4_g64, nf4, ...; for logits "4-bit"
    method: str  # rtn, gptq, rotate+gptq, ...; "none" for logits
    bits: float  # of one number, without scales; ternary: log2(3)
    scheme: Scheme

    @property
    def key(self) -> tuple[str, str, str]:
        return self.what, self.format, self.method

    def __str__(self) -> str:
        return f"{self.what} at {self.format}" + (f" by {self.method}" if self.what == "weights" else "")


@dataclass(frozen=True)
class Measured:
    """A variant of a model (None: the 16-bit model) on the windows."""

    variant: Variant | None
    scores: Scores
    nbytes: int  # of the whole model in a file, what is not quantized at two bytes a weight
    bits_per_weight: float  # of the linear layers that are quantized, scales included


@dataclass(frozen=True)
class Refusal:
    """A variant that a method does not make, such as ternary weights, and why."""

    model: str
    format: str
    method: str
    reason: str


@dataclass(frozen=True)
class Result:
    """One model at one width. The intervals of all but `perplexity` are of paired differences to the 16-bit model."""

    model: str
    what: str  # weights | logits; "none" for the 16-bit model itself
    format: str
    method: str  # "none" for logits and for the 16-bit model
    bits: float
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    nbytes: int  # of the whole model in a file, what is not quantized at two bytes a weight
    perplexity: Estimate
    ratio: Estimate  # of perplexities, to the 16-bit model's: 1.02 is 2 % worse
    kl: Estimate  # nats a token, from the 16-bit model
    agreement: Estimate  # share of tokens with the same most likely prediction
    recovered: Estimate | None  # share of the loss of rtn at this format; None: rtn itself, not compared, or no loss

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Contrast:
    """Does one model lose more to a width than another? On the same windows, paired."""

    model: str
    against: str
    what: str
    format: str
    method: str
    difference: Estimate  # log(ratio of `model`) - log(ratio of `against`), nats a token: below 0, `model` loses less

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ModelInfo:
    name: str
    path: str
    sha256: str
    attention: str
    parameters: int
    layers: int
    hidden_size: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    models: tuple[ModelInfo, ...]
    results: tuple[Result, ...]  # model by model, the 16-bit model first
    contrasts: tuple[Contrast, ...]  # every further model against the first
    confidence: float
    text: dict[str, Any]  # source, sha256, windows, length, scored tokens
    calibration: dict[str, Any] | None  # source, sha256, windows, length, tokens; None where no method calibrates
    refused: tuple[Refusal, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; plots.py and report.py take it."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row per result, for a table."""
        percent = f"{self.confidence:.0%}"
        several = any(result.method not in ("none", ROUNDED) for result in self.results)
        return [
            {
                "model": result.model,
                "what": "-" if result.what == "none" else result.what,
                "format": result.format,
                **({"method": "-" if result.method == "none" else result.method} if several else {}),
                "bits/weight": round(result.bits_per_weight, 2),
                "MB": round(result.nbytes / 1e6, 2),
                "perplexity": result.perplexity.value,
                "increase": f"{result.ratio.value - 1:+z.2%}",
                percent: f"{result.ratio.low - 1:+z.2%} to {result.ratio.high - 1:+z.2%}",
                **({"of rtn's loss recovered": _share(result.recovered)} if several else {}),
                "KL": result.kl.value,
                "agreement": f"{result.agreement.value:.2%}",
            }
            for result in self.results
        ]

    def write_json(self, path: str | Path) -> None:
        files.write_json(path, self.to_dict())

    def write_csv(self, path: str | Path) -> None:
        """Every result with the ends of its intervals, full precision."""
        flat = []
        for result in self.results:
            row: dict[str, Any] = {}
            for name, value in result.to_dict().items():
                if isinstance(value, dict) or name == "recovered":
                    ends = value or {"value": "", "low": "", "high": ""}
                    row |= {name: ends["value"], f"{name}_low": ends["low"], f"{name}_high": ends["high"]}
                else:
                    row[name] = value
            flat.append(row)
        with files.write_atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)


def variants(bits: Sequence[str] = BITS, what: Sequence[str] = WHAT, methods: Sequence[str] = METHODS) -> list[Variant]:
    """What `bits`, `what` and `methods` ask for, weights first, each in the order given; without the 16-bit model."""
    recipes = list(dict.fromkeys(parse_recipe(method).name for method in methods))
    for name in what:
        if name not in WHAT:
            raise DiffbitError(f"{name!r} cannot be compared; wanted one or both of {', '.join(WHAT)}")
    found = []
    wanted = list(dict.fromkeys(str(entry).strip() for entry in bits))
    formats = {entry: _format(entry) for entry in wanted if entry != FLOAT}
    if "weights" in what:
        for format in formats.values():
            width = 1.585 if format.kind == "ternary" else format.bits
            scheme = Scheme(weights=format)
            found += [Variant("weights", format.name, method, width, scheme) for method in recipes]
    if "logits" in what:
        for entry in formats:
            if entry.isdigit() and int(entry) in LOGIT_BITS:
                width = int(entry)
                scheme = Scheme(attention=AttentionScheme(logits=width))
                found.append(Variant("logits", f"{width}-bit", "none", width, scheme))
    if not found:
        raise DiffbitError(
            f"--bits {','.join(wanted)} with --what {','.join(what)} leaves nothing to compare with the 16-bit model; "
            f"give widths below 16, such as {','.join(BITS)}"
        )
    return found


def _format(entry: str) -> Format:
    if not entry.isdigit():
        return parse_format(entry)
    if not 2 <= int(entry) <= 8:
        raise DiffbitError(f"{entry} bits: wanted 16 (the model as it is), 8 to 2, or a format such as int4_g32 or nf4")
    return parse_format("int8" if entry == "8" else f"int{entry}_g{GROUP}")


def compare(
    paths: Sequence[str | Path],
    windows: Windows,
    bits: Sequence[str] = BITS,
    what: Sequence[str] = WHAT,
    methods: Sequence[str] = METHODS,
    *,
    calibration: Windows | None = None,
    names: Sequence[str] | None = None,
    batch_size: int = 8,
    confidence: float = CONFIDENCE,
    cache_bytes: int = 1 << 30,
    device: torch.device | str = "cpu",
) -> Comparison:
    """Compare float checkpoints at several bit-widths on windows cut by their common tokenizer.

    methods: recipes by which weights are rounded. calibration: windows of other text, for those that calibrate.
    names: of the models, for tables and plots; default the folders' names. confidence: of the intervals.
    """
    chosen = variants(bits, what, methods)
    if len(windows.ids) < 2:
        raise DiffbitError("the text fills one window, and an interval needs two: give more text, or shorter windows")
    checkpoints = [Checkpoint(path) for path in paths]
    names = _names(checkpoints, names)
    for checkpoint in checkpoints:
        for text in (windows, calibration):
            if text is not None:
                _check(checkpoint, text)
    _check_tokenizers(checkpoints)

    measured: dict[str, list[Measured]] = {}
    refused: list[Refusal] = []
    for name, checkpoint in zip(names, checkpoints, strict=True):
        decoder = models.load(checkpoint, device=device)
        try:
            measured[name], refusals = measure(
                decoder, chosen, windows, calibration, name=name, batch_size=batch_size, cache_bytes=cache_bytes
            )
        finally:
            del decoder
            gc.collect()  # before the next model comes; module hooks are reference cycles
        refused += refusals
    if not any(parse_recipe(method).calibrated for method in methods):
        calibration = None
    return conclude(checkpoints, measured, refused, windows, calibration, confidence)


def measure(
    decoder: Decoder,
    chosen: Sequence[Variant],
    windows: Windows,
    calibration: Windows | None = None,
    *,
    name: str = "the model",
    batch_size: int = 8,
    cache_bytes: int = 1 << 30,
) -> tuple[list[Measured], list[Refusal]]:
    """The 16-bit model and every variant on all windows; and the variants that their method refuses to make."""
    if batch_size < 1:
        raise DiffbitError(f"batch_size is {batch_size}, wanted 1 or more")
    if calibration is None and (calibrated := [v.method for v in chosen if _recipe_calibrates(v)]):
        raise DiffbitError(f"method {calibrated[0]} calibrates on text; give calibration windows")
    device = next(decoder.parameters()).device
    ids, target, mask = (torch.from_numpy(array) for array in (windows.ids, windows.target, windows.mask))
    batches = [slice(start, min(start + batch_size, len(ids))) for start in range(0, len(ids), batch_size)]
    kept = cache_bytes // (ids.shape[1] * decoder.config.vocab_size * 4)  # windows
    cache: dict[int, Tensor] = {}

    def run(model: Decoder, batch: slice) -> dict[int, Tensor]:
        """{window: log-probabilities [n, V] at its scored tokens}."""
        seen = None if mask[batch].all() else mask[batch].long().to(device)
        with torch.inference_mode():
            logits = model(ids[batch].to(device), attention_mask=seen)
            rows = enumerate(logits, batch.start)
            return {window: log_probabilities(row, target[window].to(device)) for window, row in rows}

    def scores(variant: Variant | None, model: Decoder) -> Scores:
        found = Scores.zeros(len(ids))
        for batch in batches:
            log_q = run(model, batch)
            log_p: dict[int, Tensor] | dict[int, None] = dict.fromkeys(log_q)
            if variant is None:
                cache.update({window: row for window, row in log_q.items() if window < kept})
            else:
                log_p = cache if all(window in cache for window in log_q) else run(decoder, batch)
            for window, row in log_q.items():
                try:
                    score(found, window, ids[window].to(device), target[window].to(device), row, log_p[window])
                except DiffbitError as error:
                    raise DiffbitError(f"{name}, {variant or '16 bits'}: {error}") from None
        return found

    measured: list[Measured] = []
    refused: list[Refusal] = []
    for variant in track([None, *chosen], f"comparing {name}"):
        model, scheme = decoder, None
        if variant is not None:
            scheme = variant.scheme
            try:
                model = _made(decoder, variant, calibration)
            except DiffbitError as error:
                refused.append(Refusal(name, variant.format, variant.method, str(error)))
                continue
        nbytes = sizes(model.config, scheme).nbytes
        measured.append(Measured(variant, scores(variant, model), nbytes, _bits_per_weight(model.config, scheme)))
        del model  # before the next one is made
    if refused and len(measured) == 1:
        raise DiffbitError(f"{name}: {refused[0].reason}")
    return measured, refused


def conclude(
    checkpoints: Sequence[Checkpoint],
    measured: Mapping[str, Sequence[Measured]],
    refused: Sequence[Refusal],
    windows: Windows,
    calibration: Windows | None,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """What was `measure`d of each model by name, the 16-bit one first, as a comparison against the first of them."""
    infos = []
    results: list[Result] = []
    contrasts = []
    (first, scores_of_first), *_ = scores = [(name, _by_key(found)) for name, found in measured.items()]
    for checkpoint, (name, own) in zip(checkpoints, scores, strict=True):
        config = checkpoint.config
        infos.append(
            ModelInfo(
                name=name,
                path=str(checkpoint.path),
                sha256=checkpoint.sha256(),
                attention=config.attention,
                parameters=num_parameters(config),
                layers=config.num_layers,
                hidden_size=config.hidden_size,
            )
        )
        results += [_result(name, variant, own, confidence) for variant in measured[name]]
        for key in own:
            if key is None or name == first or key not in scores_of_first:
                continue
            difference = paired(own[key], own[None]) - paired(scores_of_first[key], scores_of_first[None])
            what, format, method = key
            estimate = mean(difference, own[None].tokens, confidence)
            contrasts.append(Contrast(name, first, what, format, method, estimate))
    about = _about(windows) | {"scored_tokens": windows.scored}
    calibrated = None if calibration is None else _about(calibration) | {"tokens": int(calibration.mask.sum())}
    return Comparison(tuple(infos), tuple(results), tuple(contrasts), confidence, about, calibrated, tuple(refused))


def _by_key(measured: Sequence[Measured]) -> dict[Any, Scores]:
    return {one.variant.key if one.variant else None: one.scores for one in measured}


def _made(decoder: Decoder, variant: Variant, calibration: Windows | None) -> Decoder:
    if not _recipe_calibrates(variant):
        return apply(decoder, variant.scheme, "rtn" if variant.method == "none" else variant.method)
    assert calibration is not None
    return apply(
        decoder, variant.scheme, variant.method, calibration=calibration.ids, calibration_mask=calibration.mask
    )


def _recipe_calibrates(variant: Variant) -> bool:
    return variant.method != "none" and parse_recipe(variant.method).calibrated


def _about(windows: Windows) -> dict[str, Any]:
    count, length = windows.ids.shape
    return {"source": windows.source, "sha256": windows.sha256, "windows": count, "length": length}


def _result(name: str, measured: Measured, scores: dict[Any, Scores], confidence: float) -> Result:
    """scores: of all of the model's variants by key, and under None those of the 16-bit model."""
    variant, found, reference = measured.variant, measured.scores, scores[None]
    rounded = None
    if variant is not None and variant.method != ROUNDED:
        rounded = scores.get((variant.what, variant.format, ROUNDED))
    return Result(
        model=name,
        what="none" if variant is None else variant.what,
        format=FLOAT if variant is None else variant.format,
        method="none" if variant is None else variant.method,
        bits=16.0 if variant is None else variant.bits,
        bits_per_weight=measured.bits_per_weight,
        nbytes=measured.nbytes,
        perplexity=found.perplexity(confidence),
        ratio=perplexity_ratio(found, reference, confidence),
        kl=found.divergence(confidence),
        agreement=found.agreement(confidence),
        recovered=None if rounded is None else recovered(found, rounded, reference, confidence),
    )


def _share(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"


def _bits_per_weight(config: ModelConfig, scheme: Scheme | None) -> float:
    """Over the linear layers that the scheme quantizes; 16 where it quantizes none."""
    formats = {} if scheme is None else scheme.formats(config)
    if not formats:
        return 16.0
    shapes = linear_shapes(config)
    count = sum(shapes[module][0] * shapes[module][1] for module in formats)
    return 8 * sum(format.nbytes(shapes[module]) for module, format in formats.items()) / count


def _names(checkpoints: Sequence[Checkpoint], names: Sequence[str] | None) -> list[str]:
    """One name per model, all different: the folders' names, numbered where two are equal."""
    if not checkpoints:
        raise DiffbitError("no model to compare; give one checkpoint folder or more")
    if names is not None and len(names) != len(checkpoints):
        raise DiffbitError(f"{len(names)} names for {len(checkpoints)} models; give one each, or none")
    wanted = list(names) if names is not None else [checkpoint.path.resolve().name for checkpoint in checkpoints]
    return [
        name if wanted.count(name) == 1 else f"{name} ({wanted[: index + 1].count(name)})"
        for index, name in enumerate(wanted)
    ]


def _check(checkpoint: Checkpoint, windows: Windows) -> None:
    config, path = checkpoint.config, checkpoint.path
    if checkpoint.quantization is not None:
        raise DiffbitError(
            f"{path}: is quantized already; compare makes its own variants, give it the float checkpoint"
        )
    if (largest := int(windows.ids.max())) >= config.vocab_size:
        raise DiffbitError(
            f"{path}: the text holds token {largest}, the model has {config.vocab_size}; take the model's own tokenizer"
        )
    if (length := windows.ids.shape[1]) > config.max_position:
        raise DiffbitError(
            f"{path}: windows of {length} tokens are longer than its context of {config.max_position}; shorten them"
        )


def _check_tokenizers(checkpoints: Sequence[Checkpoint]) -> None:
    """Perplexities per token mean the same only under one vocabulary. Folders without tokenizer.json go unchecked."""
    seen: list[tuple[Path, Any]] = []
    for checkpoint in checkpoints:
        for file in checkpoint.tokenizer_files:
            if file.name == "tokenizer.json":
                seen.append((file, (files.read_json(file).get("model") or {}).get("vocab")))
    for path, vocabulary in seen[1:]:
        if vocabulary != seen[0][1]:
            raise DiffbitError(
                f"{path}: another vocabulary than {seen[0][0]}; perplexities per token can be compared only between "
                "models with the same tokenizer: compare them one by one"
            )
