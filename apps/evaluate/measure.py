"""Runs a model and its variants over the same windows of text, and keeps per-window scores of each.

Each variant is made in memory from the float checkpoint, scored token by token against it (metrics.py), and dropped
before the next one is made. "16 bits" is the checkpoint itself, computed in float32. Quantized checkpoints are loaded
one after the other, and artifacts run on ONNX Runtime, one window at a time.

By default, linear layers round their inputs as the artifact's operators do on a CPU, mostly to int8 in blocks (formats/
defines the rule of each format). "float" rounds them only if the scheme says so.

If weights are rounded, `repeats` makes a variant several times, each time calibrated on another sample and with another
order of the channels (quantize/reorder.py); the first uses the model's own order. `combine` makes one measurement of K
training runs, which have the shape of K roundings, each averaged over its own roundings. The k-th runs of two models
are paired, such as those that saw the same batches in the same order.

Memory: the model, one variant (which shares unquantized tensors with it), and the 16-bit model's log-probabilities for
as many windows as fit into `cache_bytes`; on the other windows the 16-bit model runs again for each variant. Low-bit
attention holds several copies of its weights [heads, T, T], so it processes as many windows at a time as fit into
EXPLICIT_BYTES.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...calib_data import NeedleWindows, Windows
from ...io.errors import DiffbitError
from ...io.progress import Progress
from ...models import Decoder, ModelConfig
from ...quantize import AttentionScheme, Scheme, apply, as_exported, average_bits, load, resolve, sizes
from ...runtime import Artifact, Session
from .cost import Cost, token_cost
from .given import Quantized
from .metrics import CONFIDENCE, Scores, log_probabilities, score
from .retrieval import answered
from .variants import RTN, Variant, unchanged

EXPLICIT_BYTES = 2 << 30  # memory for explicit attention weights in low-bit attention
COPIES = 8  # of the attention weights, in float32: logits, probabilities, masks
ARITHMETICS = ("artifact", "float")  # inputs of quantized linear layers: rounded as on a device, or not
Logits = Callable[..., Tensor]
"""(ids int64 [B, S], attention_mask= int64 [B, S] or None: all are tokens) -> logits [B, S, V], as a Decoder"""


@dataclass(frozen=True)
class Setup:
    """What every model is measured on, and how. Raises DiffbitError for values that do not fit together."""

    windows: Windows
    calibration: Sequence[Windows] = ()  # for methods that calibrate: a sample for each repeat, or one for all
    needles: Sequence[NeedleWindows] = ()
    repeats: int = 1  # roundings of each variant whose weights are rounded
    arithmetic: str = "artifact"  # one of ARITHMETICS
    confidence: float = CONFIDENCE  # of the intervals
    batch_size: int = 8  # windows at a time
    cache_bytes: int = 1 << 30  # memory for the 16-bit model's log-probabilities

    def __post_init__(self) -> None:
        if len(self.windows.ids) < 2:
            raise DiffbitError("the text fills one window; an interval needs two: give more text, or shorter windows")
        if any(len(rows.starts) < 2 for rows in self.needles):
            raise DiffbitError("needles in one row give no interval; ask for two rows or more")
        for name, number in (("batch_size", self.batch_size), ("repeats", self.repeats)):
            if number < 1:
                raise DiffbitError(f"{name} is {number}, wanted 1 or more")
        if self.arithmetic not in ARITHMETICS:
            raise DiffbitError(f"arithmetic is {self.arithmetic!r}, wanted {' or '.join(ARITHMETICS)}")
        if (count := len(self.calibration)) not in (0, 1, self.repeats):
            raise DiffbitError(f"{count} samples of calibration text for {self.repeats} repeats; give one each, or one")

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.windows.ids.shape[1]


@dataclass(frozen=True)
class Measurement:
    """What was measured of one variant of a model; compare.py makes estimates of it."""

    variant: Variant
    scores: Scores  # of one or several roundings, or of several training runs
    nbytes: int  # of the weights in a float16 artifact; of an artifact, of its files
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    cache_bytes: float  # of the KV cache, per token of context
    cost: Cost  # of a decoded token, at the windows' length
    repeats: int = 1  # roundings of the weights, in each training run
    answers: tuple[np.ndarray, ...] = ()  # [K, n, R] for each set of needles: which queries are answered


@dataclass(frozen=True)
class Skipped:
    """A variant that its method cannot make, such as ternary weights, and why."""

    model: str
    format: str
    method: str
    reason: str


def measure(
    decoder: Decoder,
    variants: Sequence[Variant],
    setup: Setup,
    *,
    name: str = "the model",
    stored: Scheme | None = None,
    quantized: Sequence[Quantized] = (),
) -> tuple[list[Measurement], list[Skipped]]:
    """Measure the model as it is, each variant of it, and the quantized checkpoints and artifacts that were made of it;
    also return the variants that were skipped.

    stored: the scheme of a model that is quantized itself and has no float one; it has no variants. Raises DiffbitError
    if a model computes NaN, or if every variant was skipped.
    """
    if not setup.calibration and (calibrated := [variant.method for variant in variants if variant.calibrates]):
        raise DiffbitError(f"method {calibrated[0]} calibrates on text; give calibration windows")
    scorer = _Scorer(decoder, setup)
    measurements: list[Measurement] = []
    skipped: list[Skipped] = []
    unrounded = unchanged(stored, decoder.config)
    roundings = {variant: setup.repeats if variant.rounds else 1 for variant in (unrounded, *variants)}
    done = 0
    with Progress("comparing", float(sum(roundings.values()) + len(quantized))) as bar:
        for variant, count in roundings.items():
            scores: list[Scores] = []
            answers: list[list[np.ndarray]] = []
            for repeat in range(count):
                scorer.progress = partial(_show, bar, done + repeat, f"{name}, {variant}")
                try:
                    model = decoder if variant is unrounded else _apply(decoder, variant, setup.calibration, repeat)
                except DiffbitError as error:
                    skipped.append(Skipped(name, variant.format, variant.method, str(error)))
                    break
                scores.append(scorer.of_decoder(model, variant, f"{name}, {variant}"))
                answers.append(scorer.answers(model, variant))
            else:
                stacked = tuple(np.stack(repeats) for repeats in zip(*answers, strict=True))
                measurements.append(_measurement(variant, model.config, setup.length, scores, stacked))
            model = decoder  # the variant is gone before the next one is made
            done += count
        if skipped and len(measurements) == 1 and not quantized:
            raise DiffbitError(f"{name}: {skipped[0].reason}")
        for entry in quantized:
            scorer.progress = partial(_show, bar, done, entry.variant.name)
            measurements.append(_measure_quantized(entry, scorer, setup))
            done += 1
    return measurements, skipped


def _measure_quantized(quantized: Quantized, scorer: _Scorer, setup: Setup) -> Measurement:
    """Measure a quantized checkpoint in torch, or an artifact on ONNX Runtime."""
    variant, model = quantized.variant, quantized.model
    if isinstance(model, Artifact):
        scores = scorer.scores(on_device(Session(model)), 1, str(model.path))
        measurement = _measurement(variant, quantized.config, setup.length, [scores])
        return replace(measurement, nbytes=model.nbytes)
    gc.collect()  # the model before this one; module hooks are reference cycles
    decoder = load(model, device=scorer.ids.device)
    scores, answers = scorer.of_decoder(decoder, variant, str(model.path)), scorer.answers(decoder, variant)
    measurement = _measurement(variant, decoder.config, setup.length, [scores], tuple(array[None] for array in answers))
    if quantized.nbytes is None or quantized.bits_per_weight is None:
        return measurement
    return replace(measurement, nbytes=quantized.nbytes, bits_per_weight=quantized.bits_per_weight)


def _show(bar: Progress, done: int, name: str, share: float) -> None:
    """Show a share of the current model beside the models that are done."""
    bar.to(done + share, name)


def _measurement(
    variant: Variant, config: ModelConfig, length: int, scores: Sequence[Scores], answers: tuple[np.ndarray, ...] = ()
) -> Measurement:
    size, cost = sizes(resolve(config, variant.scheme), "fp16"), token_cost(config, variant.scheme, length)
    bits, cache_bytes = average_bits(config, variant.scheme), size.kv_bytes_per_1k_tokens / 1000
    return Measurement(
        variant, Scores.of_repeats(scores), size.nbytes, bits, cache_bytes, cost, repeats=len(scores), answers=answers
    )


def combine(runs: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Combine the measurements of K training runs, each in the same order; leaves out what not all of them have."""
    if len(runs) == 1:
        return list(runs[0])
    by_key = [{entry.variant.key: entry for entry in run} for run in runs]
    combined = []
    for parts in ([run[key] for run in by_key] for key in by_key[0] if all(key in run for run in by_key)):
        sets = zip(*(entry.answers for entry in parts), strict=True)
        answers = tuple(np.stack([roundings.mean(0) for roundings in answers]) for answers in sets)
        scores = Scores.of_repeats([entry.scores for entry in parts])
        combined.append(replace(parts[0], scores=scores, answers=answers))
    return combined


def on_device(session: Session) -> Logits:
    """Return an artifact's logits on ONNX Runtime, as a function: one row at a time, each with an empty cache."""

    def logits(ids: Tensor, *, attention_mask: Tensor | None) -> Tensor:
        rows = []
        for row in range(len(ids)):
            session.reset()
            mask = None if attention_mask is None else attention_mask[row : row + 1].cpu().numpy()
            rows.append(session.prefill(ids[row : row + 1].cpu().numpy(), mask, all_positions=True)[0])
        return torch.from_numpy(np.stack(rows)).to(ids.device)

    return logits


class _Scorer:
    """Scores models on windows of text against the 16-bit model, whose log-probabilities it keeps if they fit."""

    def __init__(self, reference: Decoder, setup: Setup) -> None:
        windows, device = setup.windows, next(reference.parameters()).device
        self.reference, self.setup = reference, setup
        self.progress: Callable[[float], None] = lambda share: None  # of the windows of the current model
        self.ids, self.target, self.mask = (
            torch.from_numpy(array).to(device) for array in (windows.ids, windows.target, windows.mask)
        )
        self.document = windows.document
        self.cached_windows = setup.cache_bytes // (setup.length * reference.config.vocab_size * 4)
        self.cache: dict[int, Tensor] = {}
        self.begun = False  # whether the 16-bit model has been scored

    def of_decoder(self, decoder: Decoder, variant: Variant, name: str) -> Scores:
        """Score a model in torch, in the arithmetic that the setup asks for."""
        if self.setup.arithmetic == "artifact":
            as_exported(decoder)
        return self.scores(decoder, _batch_sizes(variant, decoder.config, self.setup)[0], name)

    def answers(self, decoder: Decoder, variant: Variant) -> list[np.ndarray]:
        """Return which queries a model answers, for each set of needles."""
        batch_sizes = _batch_sizes(variant, decoder.config, self.setup)[1:]
        return [answered(decoder, *rows) for rows in zip(self.setup.needles, batch_sizes, strict=True)]

    def scores(self, logits: Logits, batch_size: int, name: str) -> Scores:
        """Score the 16-bit model, which must come first, or another one; name: for errors."""
        scores = Scores.zeros(len(self.ids), self.document)
        for start in range(0, len(self.ids), batch_size):
            batch = slice(start, start + batch_size)
            log_q = self._log_probabilities(logits, batch)
            log_p: dict[int, Tensor] = {}
            if not self.begun:
                self.cache |= {window: row for window, row in log_q.items() if window < self.cached_windows}
            elif all(window in self.cache for window in log_q):
                log_p = self.cache
            else:
                log_p = self._log_probabilities(self.reference, batch)
            for window, row in log_q.items():
                try:
                    score(scores, window, self.ids[window], self.target[window], row, log_p.get(window))
                except DiffbitError as error:
                    raise DiffbitError(f"{name}: {error}") from None
            self.progress(min(1.0, (start + batch_size) / len(self.ids)))
        self.begun = True
        return scores

    def _log_probabilities(self, logits: Logits, batch: slice) -> dict[int, Tensor]:
        """{window: [n, V] at its scored tokens}."""
        mask = self.mask[batch]
        with torch.inference_mode():
            rows = logits(self.ids[batch], attention_mask=None if mask.all() else mask.long())
            return {window: log_probabilities(row, self.target[window]) for window, row in enumerate(rows, batch.start)}


def _apply(decoder: Decoder, variant: Variant, calibration: Sequence[Windows], repeat: int) -> Decoder:
    method = variant.method if variant.rounds else RTN
    text = calibration[min(repeat, len(calibration) - 1)] if variant.calibrates else None
    return apply(decoder, variant.scheme, method, *((text.ids, text.mask) if text else ()), order=repeat)


def _batch_sizes(variant: Variant, config: ModelConfig, setup: Setup) -> list[int]:
    """Return how many rows a variant processes at a time: of the windows, and of each set of needles."""
    lengths = [setup.length, *(needles.windows.ids.shape[1] for needles in setup.needles)]
    if variant.scheme.attention == AttentionScheme():
        return [setup.batch_size] * len(lengths)
    heads = max(layer.mixer.softmaxes for layer in config.layers) or 1  # each has weights of its own
    fitting = (EXPLICIT_BYTES // (COPIES * 4 * heads * length * length) for length in lengths)
    return [max(1, min(setup.batch_size, size)) for size in fitting]
