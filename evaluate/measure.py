"""Runs a model and its variants over the same windows of text, and keeps per-window scores of each.

Each variant is made in memory from the float checkpoint, scored token by token against it (metrics.py), and dropped
before the next one is made. "16 bits" is the checkpoint itself, computed in float32.

Memory: the model, one variant (which shares with it what is not quantized), and the 16-bit model's log-probabilities of
as many windows as fit into `cache_bytes`. On the other windows the 16-bit model runs again for each variant, because a
variant can be slow to make and is made only once. Low-bit attention holds its weights [heads, T, T] in memory several
times over; it takes as many windows at a time as fit into EXPLICIT_BYTES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..calib_data import NeedleWindows, Windows
from ..errors import DiffbitError
from ..models import Decoder, ModelConfig
from ..progress import track
from ..quantize import AttentionScheme, Scheme, apply, linear_shapes, sizes
from ..quantize.scheme import HEAD_MODULE
from .cost import Cost, token_cost
from .metrics import Scores, log_probabilities, score
from .retrieval import answered
from .variants import NO_METHOD, Variant

EXPLICIT_BYTES = 2 << 30  # of attention weights at a time, where low-bit attention computes them one by one
COPIES = 8  # of them, in float32: logits, probabilities, masks


@dataclass(frozen=True)
class Measured:
    """A variant of a model on the windows; variant None is the model as its checkpoint has it."""

    variant: Variant | None
    scheme: Scheme | None  # of the variant, or of a checkpoint that is quantized already
    scores: Scores
    nbytes: int  # of the weights in a float16 artifact
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    cost: Cost  # of a decoded token, at the windows' length
    answers: tuple[np.ndarray, ...] = ()  # bool [n, R] for each set of needles: which queries are answered


@dataclass(frozen=True)
class Refusal:
    """A variant that its method cannot make, such as ternary weights, and why."""

    model: str
    format: str
    method: str
    reason: str


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
    """Measure the model and each chosen variant on all windows and needles; also returns what the methods refused.

    stored: the scheme of a checkpoint that is quantized already; it has no variants. Raises DiffbitError where a model
    computes NaN, and where every variant was refused.
    """
    if batch_size < 1:
        raise DiffbitError(f"batch_size is {batch_size}, wanted 1 or more")
    if calibration is None and (calibrated := [variant.method for variant in chosen if variant.calibrates]):
        raise DiffbitError(f"method {calibrated[0]} calibrates on text; give calibration windows")
    scorer = _Scorer(decoder, windows, cache_bytes)
    measured: list[Measured] = []
    refused: list[Refusal] = []
    for variant in track([None, *chosen], f"comparing {name}"):
        model, scheme = decoder, stored
        if variant is not None:
            scheme = variant.scheme
            try:
                model = _apply(decoder, variant, calibration)
            except DiffbitError as error:
                refused.append(Refusal(name, variant.format, variant.method, str(error)))
                continue
        try:
            scores = scorer.scores(model, _batch_size(variant, decoder.config, windows.ids.shape[1], batch_size))
        except DiffbitError as error:
            raise DiffbitError(f"{name}, {variant or '16 bits'}: {error}") from None
        answers = tuple(
            answered(model, one, _batch_size(variant, decoder.config, one.windows.ids.shape[1], batch_size))
            for one in needles
        )
        measured.append(
            Measured(
                variant=variant,
                scheme=scheme,
                scores=scores,
                nbytes=sizes(model.config, scheme, "fp16").nbytes,
                bits_per_weight=_bits_per_weight(model.config, scheme),
                cost=token_cost(model.config, scheme, windows.ids.shape[1]),
                answers=answers,
            )
        )
        del model  # before the next one is made
    if refused and len(measured) == 1:
        raise DiffbitError(f"{name}: {refused[0].reason}")
    return measured, refused


class _Scorer:
    """Scores models on windows of text against the 16-bit model, whose log-probabilities it keeps where they fit."""

    def __init__(self, reference: Decoder, windows: Windows, cache_bytes: int) -> None:
        self.reference = reference
        self.device = next(reference.parameters()).device
        self.ids, self.target, self.mask = map(torch.from_numpy, (windows.ids, windows.target, windows.mask))
        self.document = windows.document
        self.cached_windows = cache_bytes // (self.ids.shape[1] * reference.config.vocab_size * 4)
        self.cache: dict[int, Tensor] = {}

    def scores(self, model: Decoder, batch_size: int) -> Scores:
        """Of the 16-bit model, which comes first, or of a variant."""
        scores = Scores.zeros(len(self.ids), self.document)
        for start in range(0, len(self.ids), batch_size):
            batch = slice(start, min(start + batch_size, len(self.ids)))
            log_q = self._log_probabilities(model, batch)
            log_p: dict[int, Tensor] = {}
            if model is self.reference:
                self.cache |= {window: row for window, row in log_q.items() if window < self.cached_windows}
            elif all(window in self.cache for window in log_q):
                log_p = self.cache
            else:
                log_p = self._log_probabilities(self.reference, batch)
            for window, row in log_q.items():
                ids, target = self.ids[window].to(self.device), self.target[window].to(self.device)
                score(scores, window, ids, target, row, log_p.get(window))
        return scores

    def _log_probabilities(self, model: Decoder, batch: slice) -> dict[int, Tensor]:
        """{window: [n, V] at its scored tokens}."""
        mask = self.mask[batch]
        seen = None if mask.all() else mask.long().to(self.device)
        with torch.inference_mode():
            logits = model(self.ids[batch].to(self.device), attention_mask=seen)  # [B, S, V]
            rows = enumerate(logits, batch.start)
            return {window: log_probabilities(row, self.target[window].to(self.device)) for window, row in rows}


def _apply(decoder: Decoder, variant: Variant, calibration: Windows | None) -> Decoder:
    method = "rtn" if variant.method == NO_METHOD else variant.method
    if not variant.calibrates:
        return apply(decoder, variant.scheme, method)
    assert calibration is not None
    return apply(decoder, variant.scheme, method, calibration=calibration.ids, calibration_mask=calibration.mask)


def _batch_size(variant: Variant | None, config: ModelConfig, length: int, wanted: int) -> int:
    """Windows of `length` tokens that a variant takes at a time, at most as many as wanted."""
    if variant is None or variant.scheme.attention == AttentionScheme():
        return wanted
    heads = max(layer.mixer.softmaxes for layer in config.layers) or 1  # each has weights of its own
    return max(1, min(wanted, EXPLICIT_BYTES // (COPIES * 4 * heads * length * length)))


def _bits_per_weight(config: ModelConfig, scheme: Scheme | None) -> float:
    """Over the decoder's linear layers that the scheme quantizes; 16 where it quantizes none."""
    formats = {} if scheme is None else scheme.formats(config)
    own = {m: shape for m, shape in linear_shapes(config).items() if m in formats and m != HEAD_MODULE}
    nbytes = sum(formats[module].device_nbytes(shape, 2) for module, shape in own.items())
    return 8 * nbytes / sum(map(prod, own.values())) if own else 16.0
