"""Accuracy against bit-width: several models, each at several widths by several methods, on the same windows of text.

For every model, every variant ("weights at int4_g64 by gptq", "attention logits at 4 bits", ...) is made in memory from
the float checkpoint and held against it, token by token: metrics.py says what is measured and how sure it is. "16" is
the checkpoint itself, computed in fp32, and counted as two bytes a weight, as it is usually stored.

A checkpoint that is quantized already, such as one trained in low bits, is measured as it is beside them: no variants
are made of it, and what it lost to a float model it does not tell.

A number of bits stands for a format: 8 for int8 (a scale per row), 7 to 2 for int7_g64 ... int2_g64; formats may also
be named: int4_g32, nf4, ternary. Of attention (quantize/attention.py), each `what` takes the bits it has a format for
and leaves out the others:

    logits          2 to 8, dynamic absmax per query row (arXiv 2410.05258, Figure 8)
    qk              8, 4: products of integers; keys then have as many bits
    kv              8, 4, 2, or int8, int4, int2: keys and values of the KV cache
    keys, values    the same, one without the other

Beside text, the same variants may be asked for needles (retrieval.py): rows of their own, which only count answers.

A method is a recipe of quantize/methods, such as "gptq" or "rotate+gptq"; those that calibrate do so on windows of
their own. Beside plain rounding ("rtn") each of the others also says which share of its loss it recovers.

Memory: the model, one quantized copy (which shares what is not quantized), and the 16-bit model's log-probabilities of
as many windows as fit into `cache_bytes`. Over the other windows the 16-bit model runs anew for each variant: a variant
may be slow to make, so it is made once. Low-bit attention has its weights [heads, T, T] in memory, a few times over:
it takes as many windows at a time as fit into EXPLICIT_BYTES.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..calib_data import NeedleWindows, Windows
from ..errors import DiffbitError
from ..models import Checkpoint, Decoder, ModelConfig, num_parameters
from ..models.attention import variant as attention_variant
from ..progress import track
from ..quantize import (
    AttentionScheme,
    Format,
    Scheme,
    apply,
    linear_shapes,
    load,
    parse_format,
    parse_recipe,
    read_scheme,
    sizes,
)
from ..quantize.cache import cache_spec
from ..quantize.scheme import KV, LOGIT_BITS, QK
from .cost import Cost, token_cost
from .metrics import CONFIDENCE, Estimate, Scores, log_probabilities, mean, paired, perplexity_ratio, recovered, score
from .retrieval import Retrieval, answered, contrast, label, retrieval, settings

BITS = ("16", "8", "6", "4", "3", "2", "ternary")
WHAT = ("weights", "logits", "qk", "kv", "keys", "values")
ATTENTION_WHAT = {"qk": QK, "kv": KV, "keys": KV, "values": KV}  # and the formats of each
FLOAT = "16"
METHODS = ("rtn",)
ROUNDED = "rtn"  # the method whose loss the others recover
GROUP = 64  # of a format that is given as a number of bits below 8
EXPLICIT_BYTES = 2 << 30  # of attention weights at a time, where low-bit attention computes them one by one
COPIES = 8  # of them, in float32: logits, probabilities, masks


@dataclass(frozen=True)
class Variant:
    """Something to compare with the 16-bit model."""

    what: str  # one of WHAT
    format: str  # int4_g64, nf4, ...; int8, int4, int2 of qk and the KV cache; for logits "4-bit"
    method: str  # rtn, gptq, rotate+gptq, ...; "none" but for weights
    bits: float  # of one number, without scales; ternary: log2(3)
    scheme: Scheme

    @property
    def key(self) -> tuple[str, str, str]:
        return self.what, self.format, self.method

    def __str__(self) -> str:
        return f"{self.what} at {self.format}" + (f" by {self.method}" if self.what == "weights" else "")


@dataclass(frozen=True)
class Measured:
    """A variant of a model (None: the model as its checkpoint has it) on the windows."""

    variant: Variant | None
    scheme: Scheme | None  # of the variant, or of a checkpoint that is quantized already
    scores: Scores
    nbytes: int  # of the whole model in a file, what is not quantized at two bytes a weight
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    cost: Cost  # of a token, at the windows' length
    answers: tuple[np.ndarray, ...] = ()  # bool [n, R] for each of the needles asked for: which queries are answered


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
    what: str  # one of WHAT; "none" for the 16-bit model itself, or a quantized checkpoint
    format: str
    method: str  # "none" but for weights
    bits: float
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    nbytes: int  # of the whole model in a file, what is not quantized at two bytes a weight
    perplexity: Estimate
    ratio: Estimate  # of perplexities, to the 16-bit model's: 1.02 is 2 % worse
    kl: Estimate  # nats a token, from the 16-bit model
    agreement: Estimate  # share of tokens with the same most likely prediction
    recovered: Estimate | None  # share of the loss of rtn at this format; None: rtn itself, not compared, or no loss
    cache_bytes: float  # of the KV cache, a token of context
    cost: Cost  # of a decoded token, at the windows' length
    retrieval: tuple[Retrieval, ...]  # of the needles asked for

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
    retrieval: tuple[Estimate, ...]  # change of `model` - change of `against`, of needles: above 0, `model` loses less

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
    needles: tuple[dict[str, Any], ...]  # length, needles, queries, rows, source, sha256 of each that was asked for

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; plots.py and report.py take it."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row per result, for a table. Of a decoded token: "MB moved", millions of operations of ternary, integer and
        float weights ("M ops t/i/f") and the energy, of the 16-bit model's (cost.py)."""
        percent = f"{self.confidence:.0%}"
        several = any(result.method not in ("none", ROUNDED) for result in self.results)
        compared = {result.what for result in self.results}
        weights, cache = "weights" in compared, compared & set(ATTENTION_WHAT)
        energy = {result.model: result.cost.energy() for result in self.results if result.what == "none"}

        def alone(result: Result) -> bool:
            """Of a checkpoint that came quantized: there is nothing to hold it against."""
            return result.what == "none" and result.format != FLOAT

        return [
            {
                "model": result.model,
                "what": "-" if result.what == "none" else result.what,
                "format": result.format,
                **({"method": "-" if result.method == "none" else result.method} if several else {}),
                **({"bits/weight": round(result.bits_per_weight, 2)} if weights else {}),
                **({"MB": round(result.nbytes / 1e6, 2)} if weights else {}),
                **({"KV bytes/token": round(result.cache_bytes, 1)} if cache else {}),
                "MB moved": round(result.cost.nbytes / 1e6, 2),
                "M ops t/i/f": "/".join(f"{count / 1e6:.1f}" for count in result.cost.operations.values()),
                "energy": "-" if alone(result) else f"{result.cost.energy() / energy[result.model]:.1%}",
                "perplexity": result.perplexity.value,
                "increase": "-" if alone(result) else f"{result.ratio.value - 1:+z.2%}",
                percent: "-" if alone(result) else f"{result.ratio.low - 1:+z.2%} to {result.ratio.high - 1:+z.2%}",
                **({"of rtn's loss recovered": _share(result.recovered)} if several else {}),
                "KL": "-" if alone(result) else result.kl.value,
                "agreement": "-" if alone(result) else f"{result.agreement.value:.2%}",
                **{f"found, {label(one)}": _found(one) for one in result.retrieval},
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
                if name == "cost":
                    row |= result.cost.columns()
                elif isinstance(value, dict) or name == "recovered":
                    row |= _ends(name, value)
                elif name != "retrieval":
                    row[name] = value
            for one in result.retrieval:
                name = f"retrieval_{one.needles}_{one.queries}_{one.length}"
                row |= _ends(name, one.accuracy.to_dict()) | _ends(f"{name}_change", one.change.to_dict())
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
            raise DiffbitError(f"{name!r} cannot be compared; wanted one or more of {', '.join(WHAT)}")
    found: list[Variant] = []
    wanted = list(dict.fromkeys(str(entry).strip() for entry in bits))
    formats = {entry: _format(entry) for entry in wanted if entry != FLOAT}
    if "weights" in what:
        for format in formats.values():
            scheme = Scheme(weights=format)
            found += [Variant("weights", format.name, method, _bits(format), scheme) for method in recipes]
    if "logits" in what:
        for entry in formats:
            if entry.isdigit() and int(entry) in LOGIT_BITS:
                width = int(entry)
                scheme = Scheme(attention=AttentionScheme(logits=width))
                found.append(Variant("logits", f"{width}-bit", "none", width, scheme))
    for name in (name for name in ATTENTION_WHAT if name in what):
        for entry in dict.fromkeys(f"int{entry}" if entry.isdigit() else entry for entry in formats):
            if entry in ATTENTION_WHAT[name]:
                parts = ("keys", "values") if name == "kv" else (name,)
                scheme = Scheme(attention=AttentionScheme.from_dict(dict.fromkeys(parts, entry)))
                found.append(Variant(name, entry, "none", int(entry.removeprefix("int")), scheme))
    if not found:
        raise DiffbitError(
            f"--bits {','.join(wanted)} with --what {','.join(what)} leaves nothing to compare with the 16-bit model; "
            f"give widths below 16, such as {','.join(BITS)}"
        )
    return found


def _bits(format: Format) -> float:
    return 1.585 if format.kind == "ternary" else format.bits


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
    needles: Sequence[NeedleWindows] = (),
) -> Comparison:
    """Compare float checkpoints at several bit-widths, and quantized ones as they are, on windows cut by their common
    tokenizer.

    methods: recipes by which weights are rounded. calibration: windows of other text, for those that calibrate.
    names: of the models, for tables and plots; default the folders' names. confidence: of the intervals. needles: rows
    that the same variants are asked to find needles in.
    """
    chosen = variants(bits, what, methods)
    if len(windows.ids) < 2:
        raise DiffbitError("the text fills one window, and an interval needs two: give more text, or shorter windows")
    if any(len(one.starts) < 2 for one in needles):
        raise DiffbitError("needles in one row give no interval; ask for two rows or more")
    checkpoints = [Checkpoint(path) for path in paths]
    names = _names(checkpoints, names)
    for checkpoint in checkpoints:
        for text in (windows, calibration, *(one.windows for one in needles)):
            if text is not None:
                _check(checkpoint, text)
    _check_tokenizers(checkpoints)

    measured: dict[str, list[Measured]] = {}
    refused: list[Refusal] = []
    for name, checkpoint in zip(names, checkpoints, strict=True):
        scheme = read_scheme(checkpoint)
        decoder = load(checkpoint, device=device)
        try:
            measured[name], refusals = measure(
                decoder,
                chosen if scheme is None else (),
                windows,
                calibration,
                name=name,
                batch_size=batch_size,
                cache_bytes=cache_bytes,
                needles=needles,
                stored=scheme,
            )
        finally:
            del decoder
            gc.collect()  # before the next model comes; module hooks are reference cycles
        refused += refusals
    if not any(parse_recipe(method).calibrated for method in methods):
        calibration = None
    return conclude(checkpoints, measured, refused, windows, calibration, confidence, needles)


def measure(
    decoder: Decoder,
    chosen: Sequence[Variant],
    windows: Windows,
    calibration: Windows | None = None,
    *,
    name: str = "the model",
    batch_size: int = 8,
    cache_bytes: int = 1 << 30,
    needles: Sequence[NeedleWindows] = (),
    stored: Scheme | None = None,
) -> tuple[list[Measured], list[Refusal]]:
    """The model and every variant on all windows and needles; and the variants that their method refuses.

    stored: the scheme of a model that is quantized as it comes, of which there are no variants."""
    if batch_size < 1:
        raise DiffbitError(f"batch_size is {batch_size}, wanted 1 or more")
    if calibration is None and (calibrated := [v.method for v in chosen if _recipe_calibrates(v)]):
        raise DiffbitError(f"method {calibrated[0]} calibrates on text; give calibration windows")
    device = next(decoder.parameters()).device
    ids, target, mask = (torch.from_numpy(array) for array in (windows.ids, windows.target, windows.mask))
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
        size = _batch_size(variant, decoder.config, ids.shape[1], batch_size)
        for batch in (slice(start, min(start + size, len(ids))) for start in range(0, len(ids), size)):
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
        model, scheme = decoder, stored
        if variant is not None:
            scheme = variant.scheme
            try:
                model = _made(decoder, variant, calibration)
            except DiffbitError as error:
                refused.append(Refusal(name, variant.format, variant.method, str(error)))
                continue
        nbytes, cost = sizes(model.config, scheme).nbytes, token_cost(model.config, scheme, ids.shape[1])
        found = scores(variant, model)
        answers = tuple(
            answered(model, one, _batch_size(variant, decoder.config, one.windows.ids.shape[1], batch_size))
            for one in needles
        )
        measured.append(Measured(variant, scheme, found, nbytes, _bits_per_weight(model.config, scheme), cost, answers))
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
    needles: Sequence[NeedleWindows] = (),
) -> Comparison:
    """What was `measure`d of each model by name, the 16-bit one first, as a comparison against the first of them."""
    infos = []
    results: list[Result] = []
    contrasts = []
    (first, of_first), *_ = by_key = [(name, _by_key(found)) for name, found in measured.items()]
    for checkpoint, (name, own) in zip(checkpoints, by_key, strict=True):
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
        results += [_result(name, checkpoint.config, one, own, confidence, needles) for one in measured[name]]
        for key in own:
            if key is None or name == first or key not in of_first:
                continue
            low, whole, other, other_whole = own[key], own[None], of_first[key], of_first[None]
            lost = paired(low.scores, whole.scores) - paired(other.scores, other_whole.scores)
            answers = zip(low.answers, whole.answers, other.answers, other_whole.answers, strict=True)
            found = tuple(contrast((a, b), (c, d), confidence) for a, b, c, d in answers)
            what, format, method = key
            estimate = mean(lost, whole.scores.tokens, confidence)
            contrasts.append(Contrast(name, first, what, format, method, estimate, found))
    about = _about(windows) | {"scored_tokens": windows.scored}
    calibrated = None if calibration is None else _about(calibration) | {"tokens": int(calibration.mask.sum())}
    return Comparison(
        tuple(infos),
        tuple(results),
        tuple(contrasts),
        confidence,
        about,
        calibrated,
        tuple(refused),
        tuple(settings(needles)),
    )


def _by_key(measured: Sequence[Measured]) -> dict[Any, Measured]:
    return {one.variant.key if one.variant else None: one for one in measured}


def _batch_size(variant: Variant | None, config: ModelConfig, length: int, wanted: int) -> int:
    """Windows of `length` tokens that a variant takes at a time, at most as many as wanted."""
    if variant is None or variant.scheme.attention == AttentionScheme():
        return wanted
    heads, _ = attention_variant(config.attention).Attention.hf_heads(config)  # sub-heads, which have weights each
    return max(1, min(wanted, EXPLICIT_BYTES // (COPIES * 4 * heads * length * length)))


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


def _result(
    name: str,
    config: ModelConfig,
    measured: Measured,
    own: dict[Any, Measured],
    confidence: float,
    needles: Sequence[NeedleWindows],
) -> Result:
    """own: all of the model's variants by key, and under None the 16-bit model."""
    variant, found, reference = measured.variant, measured.scores, own[None].scores
    stored = None if measured.scheme is None else measured.scheme.weights
    attention = AttentionScheme() if measured.scheme is None else measured.scheme.attention
    rounded = None
    if variant is not None and variant.method != ROUNDED:
        rounded = own.get((variant.what, variant.format, ROUNDED))
    return Result(
        model=name,
        what="none" if variant is None else variant.what,
        format=variant.format if variant else stored.name if stored else FLOAT,
        method="none" if variant is None else variant.method,
        bits=variant.bits if variant else _bits(stored) if stored else 16.0,
        bits_per_weight=measured.bits_per_weight,
        nbytes=measured.nbytes,
        perplexity=found.perplexity(confidence),
        ratio=perplexity_ratio(found, reference, confidence),
        kl=found.divergence(confidence),
        agreement=found.agreement(confidence),
        recovered=None if rounded is None else recovered(found, rounded.scores, reference, confidence),
        cache_bytes=cache_spec(config, attention, "float16").bytes_per_1k_tokens / 1000,
        cost=measured.cost,
        retrieval=tuple(
            retrieval(one, answers, whole, confidence)
            for one, answers, whole in zip(needles, measured.answers, own[None].answers, strict=True)
        ),
    )


def _found(one: Retrieval) -> str:
    """Share of queries answered and, in points, its change with the interval."""
    change = (f"{100 * end:+z.1f}" for end in (one.change.value, one.change.low, one.change.high))
    return f"{one.accuracy.value:.1%} ({next(change)}; {next(change)} to {next(change)})"


def _ends(name: str, estimate: Mapping[str, float] | None) -> dict[str, Any]:
    """An estimate as three columns; empty ones where there is none."""
    ends: Mapping[str, Any] = estimate or {"value": "", "low": "", "high": ""}
    return {name: ends["value"], f"{name}_low": ends["low"], f"{name}_high": ends["high"]}


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
