"""Accuracy against bit-width: several models, each at several widths, on the same windows of text.

For every model, every variant ("weights at int4_g64", "attention logits at 4 bits", ...) is made in memory from the
float checkpoint and held against it, token by token: metrics.py says what is measured and how sure it is. "16" is the
checkpoint itself, computed in fp32, and counted as two bytes a weight, as it is usually stored.

A number of bits stands for a format: 8 for int8 (a scale per row), 7 to 2 for int7_g64 ... int2_g64; formats may also
be named: int4_g32, nf4, ternary. Attention logits take whole numbers only (dynamic absmax per query row, arXiv
2410.05258, Figure 8); named formats are left out there.

Memory: the model, one quantized copy (which shares what is not quantized), and the 16-bit model's log-probabilities of
as many windows as fit into `cache_bytes`. If not all fit, the variants are made anew for each part of the text:
rounding a model is cheap against running it. So the 16-bit model runs over each window once, whatever is compared.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Iterator, Sequence
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
from ..quantize import AttentionScheme, Format, Scheme, apply, linear_shapes, parse_format, sizes
from ..quantize.scheme import LOGIT_BITS
from .metrics import CONFIDENCE, Estimate, Scores, log_probabilities, mean, paired, perplexity_ratio, score

BITS = ("16", "8", "6", "4", "3", "2", "ternary")
WHAT = ("weights", "logits")
FLOAT = "16"
GROUP = 64  # of a format that is given as a number of bits below 8


@dataclass(frozen=True)
class Variant:
    """Something to compare with the 16-bit model."""

    what: str  # weights | logits
    format: str  # int4_g64, nf4, ...; for logits "4-bit"
    bits: float  # of one number, without scales; ternary: log2(3)
    scheme: Scheme


@dataclass(frozen=True)
class Result:
    """One model at one width. The intervals of all but `perplexity` are of paired differences to the 16-bit model."""

    model: str
    what: str  # weights | logits; "none" for the 16-bit model itself
    format: str
    bits: float
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    nbytes: int  # of the whole model in a file, what is not quantized at two bytes a weight
    perplexity: Estimate
    ratio: Estimate  # of perplexities, to the 16-bit model's: 1.02 is 2 % worse
    kl: Estimate  # nats a token, from the 16-bit model
    agreement: Estimate  # share of tokens with the same most likely prediction

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Contrast:
    """Does one model lose more to a width than another? On the same windows, paired."""

    model: str
    against: str
    what: str
    format: str
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; plots.py and report.py take it."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row per result, for a table."""
        percent = f"{self.confidence:.0%}"
        return [
            {
                "model": result.model,
                "what": "-" if result.what == "none" else result.what,
                "format": result.format,
                "bits/weight": round(result.bits_per_weight, 2),
                "MB": round(result.nbytes / 1e6, 2),
                "perplexity": result.perplexity.value,
                "increase": f"{result.ratio.value - 1:+z.2%}",
                percent: f"{result.ratio.low - 1:+z.2%} to {result.ratio.high - 1:+z.2%}",
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
                if isinstance(value, dict):
                    row |= {name: value["value"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
                else:
                    row[name] = value
            flat.append(row)
        with files.write_atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)


def variants(bits: Sequence[str] = BITS, what: Sequence[str] = WHAT) -> list[Variant]:
    """What `bits` and `what` ask for, weights first, each in the order given; without the 16-bit model."""
    for name in what:
        if name not in WHAT:
            raise DiffbitError(f"{name!r} cannot be compared; wanted one or both of {', '.join(WHAT)}")
    found = []
    wanted = list(dict.fromkeys(str(entry).strip() for entry in bits))
    formats = {entry: _format(entry) for entry in wanted if entry != FLOAT}
    if "weights" in what:
        for format in formats.values():
            width = 1.585 if format.kind == "ternary" else format.bits
            found.append(Variant("weights", format.name, width, Scheme(weights=format)))
    if "logits" in what:
        for entry in formats:
            if entry.isdigit() and int(entry) in LOGIT_BITS:
                width = int(entry)
                found.append(Variant("logits", f"{width}-bit", width, Scheme(attention=AttentionScheme(logits=width))))
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
    *,
    names: Sequence[str] | None = None,
    batch_size: int = 8,
    confidence: float = CONFIDENCE,
    cache_bytes: int = 1 << 30,
    device: torch.device | str = "cpu",
) -> Comparison:
    """Compare float checkpoints at several bit-widths on windows cut by their common tokenizer.

    names: of the models, for tables and plots; default the folders' names. confidence: of the intervals.
    """
    chosen = variants(bits, what)
    if batch_size < 1:
        raise DiffbitError(f"batch_size is {batch_size}, wanted 1 or more")
    if len(windows.ids) < 2:
        raise DiffbitError("the text fills one window, and an interval needs two: give more text, or shorter windows")
    checkpoints = [Checkpoint(path) for path in paths]
    names = _names(checkpoints, names)
    for checkpoint in checkpoints:
        _check(checkpoint, windows)
    _check_tokenizers(checkpoints)

    infos, results, contrasts = [], [], []
    first: list[Scores] = []  # of the first model, the 16-bit one included
    for name, checkpoint in zip(names, checkpoints, strict=True):
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
        decoder = models.load(checkpoint, device=device)
        try:
            scores = _scores(decoder, chosen, windows, batch_size, cache_bytes, name)
        finally:
            del decoder
            gc.collect()  # before the next model comes; module hooks are reference cycles
        reference, rest = scores[0], scores[1:]
        results.append(_result(name, config, None, reference, reference, confidence))
        for variant, found in zip(chosen, rest, strict=True):
            results.append(_result(name, config, variant, found, reference, confidence))
        if not first:
            first = scores
            continue
        for variant, found, other in zip(chosen, rest, first[1:], strict=True):
            difference = paired(found, reference) - paired(other, first[0])
            estimate = mean(difference, found.tokens, confidence)
            contrasts.append(Contrast(name, names[0], variant.what, variant.format, estimate))
    text = {
        "source": windows.source,
        "sha256": windows.sha256,
        "windows": len(windows.ids),
        "length": int(windows.ids.shape[1]),
        "scored_tokens": windows.scored,
    }
    return Comparison(tuple(infos), tuple(results), tuple(contrasts), confidence, text)


def _scores(
    decoder: Decoder, chosen: Sequence[Variant], windows: Windows, batch_size: int, cache_bytes: int, name: str
) -> list[Scores]:
    """Scores of the 16-bit model and of every variant, on all windows."""
    device = next(decoder.parameters()).device
    ids, target, mask = (torch.from_numpy(array) for array in (windows.ids, windows.target, windows.mask))
    scores = [Scores.zeros(len(ids)) for _ in range(1 + len(chosen))]
    at_once = max(1, cache_bytes // (ids.shape[1] * decoder.config.vocab_size * 4))
    parts = [range(start, min(start + at_once, len(ids))) for start in range(0, len(ids), at_once)]

    def run(model: Decoder, part: range) -> Iterator[tuple[int, Tensor]]:
        """(window, log-probabilities [n, V] at its scored tokens)."""
        for start in range(part.start, part.stop, batch_size):
            batch = slice(start, min(start + batch_size, part.stop))
            seen = None if mask[batch].all() else mask[batch].long().to(device)
            logits = model(ids[batch].to(device), attention_mask=seen)
            for window, row in enumerate(logits, start):
                yield window, log_probabilities(row, target[window].to(device))

    def enter(index: int, window: int, log_q: Tensor, log_p: Tensor | None) -> None:
        try:
            score(scores[index], window, ids[window].to(device), target[window].to(device), log_q, log_p)
        except DiffbitError as error:
            what = f"{chosen[index - 1].what} at {chosen[index - 1].format}" if index else "16 bits"
            raise DiffbitError(f"{name}, {what}: {error}") from None

    def steps() -> Iterator[None]:
        for part in parts:
            cache = {}
            for window, log_p in run(decoder, part):
                enter(0, window, log_p, None)
                cache[window] = log_p
            yield
            for index, variant in enumerate(chosen, 1):
                model = apply(decoder, variant.scheme)
                for window, log_q in run(model, part):
                    enter(index, window, log_q, cache[window])
                yield

    with torch.inference_mode():
        for _ in track(steps(), f"comparing {name}", total=len(parts) * len(scores)):
            pass
    return scores


def _result(
    name: str, config: ModelConfig, variant: Variant | None, found: Scores, reference: Scores, confidence: float
) -> Result:
    scheme = None if variant is None else variant.scheme
    return Result(
        model=name,
        what="none" if variant is None else variant.what,
        format=FLOAT if variant is None else variant.format,
        bits=16.0 if variant is None else variant.bits,
        bits_per_weight=_bits_per_weight(config, scheme),
        nbytes=sizes(config, scheme).nbytes,
        perplexity=found.perplexity(confidence),
        ratio=perplexity_ratio(found, reference, confidence),
        kl=found.divergence(confidence),
        agreement=found.agreement(confidence),
    )


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
