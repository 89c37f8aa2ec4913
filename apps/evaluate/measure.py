"""Runs a model and its variants over the same windows of text, and keeps per-window scores of each.

Each variant is made in memory from the float checkpoint, scored token by token against it (metrics.py), and dropped
before the next one is made. "16 bits" is the checkpoint itself, computed in float32. Artifacts of the model run on ONNX
Runtime, one window at a time.

By default, linear layers round their inputs as the artifact's operators do on a CPU, mostly to int8 in blocks
(quantize/formats/ defines the rule of each format). "float" rounds them only if the scheme says so.

If weights are rounded, `repeats` makes a variant several times, each time calibrated on another sample and with another
order of the channels (quantize/reorder.py); the first uses the model's own order.

Memory: the model, one variant (which shares unquantized tensors with it), and the 16-bit model's log-probabilities for
as many windows as fit into `cache_bytes`. On the other windows the 16-bit model runs again for each variant, because a
variant can be slow to make and is made only once. Low-bit attention holds several copies of its weights [heads, T, T];
it processes as many windows at a time as fit into EXPLICIT_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ...calib_data import NeedleWindows, Windows
from ...io.errors import DiffbitError
from ...io.fields import located
from ...io.progress import track
from ...models import Decoder, ModelConfig
from ...quantize import HEAD_MODULE, AttentionScheme, Scheme, apply, linear_shapes, sizes
from ...quantize.model import as_exported
from ...runtime import Artifact, Session
from .cost import Cost, token_cost
from .metrics import Scores, log_probabilities, score
from .retrieval import answered
from .variants import Variant, on_a_device

EXPLICIT_BYTES = 2 << 30  # memory for explicit attention weights in low-bit attention
COPIES = 8  # of the attention weights, in float32: logits, probabilities, masks


ARITHMETICS = ("artifact", "float")  # inputs of quantized linear layers: rounded as on a device, or not
Logits = Callable[[Tensor, Tensor | None], Tensor]
"""(ids int64 [B, S], mask int64 [B, S] or None: all are tokens) -> logits [B, S, V]"""


@dataclass(frozen=True)
class Measured:
    """A variant of a model on the windows; variant None is the unchanged checkpoint."""

    variant: Variant | None
    scheme: Scheme | None  # of the variant, or of a checkpoint that is quantized already
    scores: Scores  # of one or several roundings, or of several training runs
    nbytes: int  # of the weights in a float16 artifact; of an artifact, of its files
    bits_per_weight: float  # of the linear layers that are quantized, scales included
    cost: Cost  # of a decoded token, at the windows' length
    repeats: int = 1  # roundings of the weights, in each training run
    answers: tuple[np.ndarray, ...] = ()  # [K, n, R] for each set of needles: which queries are answered


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
    calibration: Sequence[Windows] = (),
    *,
    name: str = "the model",
    repeats: int = 1,
    arithmetic: str = "artifact",
    batch_size: int = 8,
    cache_bytes: int = 1 << 30,
    needles: Sequence[NeedleWindows] = (),
    stored: Scheme | None = None,
    artifacts: Sequence[Artifact] = (),
) -> tuple[list[Measured], list[Refusal]]:
    """Measure the model and each chosen variant on all windows and needles; also returns what the methods refused.

    calibration: a sample for each repeat, or one for all. stored: the scheme of a checkpoint that is already quantized;
    it has no variants. artifacts: of this model. Raises DiffbitError if a model computes NaN, or if every variant was
    refused.
    """
    _check(chosen, calibration, repeats, arithmetic, batch_size)
    scorer = _Scorer(decoder, windows, cache_bytes)
    measured: list[Measured] = []
    refused: list[Refusal] = []
    length = windows.ids.shape[1]
    for variant in track([None, *chosen], f"comparing {name}"):
        model, scheme = decoder, stored if variant is None else variant.scheme
        scores: list[Scores] = []
        answers: list[list[np.ndarray]] = []
        for repeat in range(repeats if variant is not None and variant.rounds else 1):
            if variant is not None:
                try:
                    model = _apply(decoder, variant, calibration, repeat)
                except DiffbitError as error:
                    refused.append(Refusal(name, variant.format, variant.method, str(error)))
                    break
            if arithmetic == "artifact":
                as_exported(model)
            try:
                scores.append(scorer.scores(in_torch(model), _batch_size(variant, decoder.config, length, batch_size)))
            except DiffbitError as error:
                raise DiffbitError(f"{name}, {variant or '16 bits'}: {error}") from None
            sizes_ = [_batch_size(variant, decoder.config, one.windows.ids.shape[1], batch_size) for one in needles]
            answers.append([answered(model, one, size) for one, size in zip(needles, sizes_, strict=True)])
        else:
            measured.append(
                Measured(
                    variant=variant,
                    scheme=scheme,
                    scores=Scores.of_repeats(scores),
                    nbytes=sizes(model.config, scheme, "fp16").nbytes,
                    bits_per_weight=_bits_per_weight(model.config, scheme),
                    cost=token_cost(model.config, scheme, length),
                    repeats=len(scores),
                    answers=tuple(np.stack(sets) for sets in zip(*answers, strict=True)),
                )
            )
        del model  # before the next one is made
    if refused and len(measured) == 1:
        raise DiffbitError(f"{name}: {refused[0].reason}")
    measured += [_measured_on_device(artifact, scorer, length) for artifact in track(artifacts, "running artifacts")]
    return measured, refused


def _check(
    chosen: Sequence[Variant], calibration: Sequence[Windows], repeats: int, arithmetic: str, batch_size: int
) -> None:
    if batch_size < 1:
        raise DiffbitError(f"batch_size is {batch_size}, wanted 1 or more")
    if repeats < 1:
        raise DiffbitError(f"repeats is {repeats}, wanted 1 or more")
    if arithmetic not in ARITHMETICS:
        raise DiffbitError(f"arithmetic is {arithmetic!r}, wanted {' or '.join(ARITHMETICS)}")
    if not calibration and (calibrated := [variant.method for variant in chosen if variant.calibrates]):
        raise DiffbitError(f"method {calibrated[0]} calibrates on text; give calibration windows")
    if calibration and len(calibration) not in (1, repeats):
        raise DiffbitError(
            f"{len(calibration)} samples of calibration text for {repeats} repeats; give one each, or one"
        )


def in_torch(model: Decoder) -> Logits:
    device = next(model.parameters()).device

    def logits(ids: Tensor, mask: Tensor | None) -> Tensor:
        logits: Tensor = model(ids.to(device), attention_mask=None if mask is None else mask.to(device))
        return logits

    return logits


def on_device(session: Session) -> Logits:
    """Return the logits function of an artifact on ONNX Runtime: one row at a time, each with an empty cache."""

    def logits(ids: Tensor, mask: Tensor | None) -> Tensor:
        rows = []
        for row in range(len(ids)):
            session.reset()
            seen = None if mask is None else mask[row : row + 1].numpy()
            rows.append(session.prefill(ids[row : row + 1].numpy(), seen, all_positions=True)[0])
        return torch.from_numpy(np.stack(rows))

    return logits


def _measured_on_device(artifact: Artifact, scorer: _Scorer, length: int) -> Measured:
    scheme = None if artifact.scheme is None else Scheme.from_dict(artifact.scheme)
    config = ModelConfig.from_dict(dict(artifact.model))
    with located(artifact.path):
        scores = scorer.scores(on_device(Session(artifact)), 1)
    return Measured(
        variant=on_a_device(artifact),
        scheme=scheme,
        scores=scores,
        nbytes=artifact.nbytes,
        bits_per_weight=_bits_per_weight(config, scheme),
        cost=token_cost(config, scheme, length),
    )


class _Scorer:
    """Scores models on windows of text against the 16-bit model, whose log-probabilities it keeps if they fit."""

    def __init__(self, reference: Decoder, windows: Windows, cache_bytes: int) -> None:
        self.reference = reference
        self.device = next(reference.parameters()).device
        self.ids, self.target, self.mask = map(torch.from_numpy, (windows.ids, windows.target, windows.mask))
        self.document = windows.document
        self.cached_windows = cache_bytes // (self.ids.shape[1] * reference.config.vocab_size * 4)
        self.cache: dict[int, Tensor] = {}
        self.begun = False  # whether the 16-bit model has been scored

    def scores(self, logits: Logits, batch_size: int) -> Scores:
        """Score the 16-bit model, which must come first, or another one."""
        scores = Scores.zeros(len(self.ids), self.document)
        for start in range(0, len(self.ids), batch_size):
            batch = slice(start, min(start + batch_size, len(self.ids)))
            log_q = self._log_probabilities(logits, batch)
            log_p: dict[int, Tensor] = {}
            if not self.begun:
                self.cache |= {window: row for window, row in log_q.items() if window < self.cached_windows}
            elif all(window in self.cache for window in log_q):
                log_p = self.cache
            else:
                log_p = self._log_probabilities(in_torch(self.reference), batch)
            for window, row in log_q.items():
                ids, target = self.ids[window].to(self.device), self.target[window].to(self.device)
                score(scores, window, ids, target, row, log_p.get(window))
        self.begun = True
        return scores

    def _log_probabilities(self, logits: Logits, batch: slice) -> dict[int, Tensor]:
        """{window: [n, V] at its scored tokens}."""
        mask = self.mask[batch]
        with torch.inference_mode():
            rows = enumerate(logits(self.ids[batch], None if mask.all() else mask.long()), batch.start)
            return {
                window: log_probabilities(row.to(self.device), self.target[window].to(self.device))
                for window, row in rows
            }


def _apply(decoder: Decoder, variant: Variant, calibration: Sequence[Windows], repeat: int) -> Decoder:
    method = variant.method if variant.rounds else "rtn"
    if not variant.calibrates:
        return apply(decoder, variant.scheme, method, order=repeat)
    text = calibration[min(repeat, len(calibration) - 1)]
    return apply(decoder, variant.scheme, method, text.ids, text.mask, order=repeat)


def _batch_size(variant: Variant | None, config: ModelConfig, length: int, batch_size: int) -> int:
    """Return how many windows of `length` tokens a variant processes at a time, at most `batch_size`."""
    if variant is None or variant.scheme.attention == AttentionScheme():
        return batch_size
    heads = max(layer.mixer.softmaxes for layer in config.layers) or 1  # each has weights of its own
    return max(1, min(batch_size, EXPLICIT_BYTES // (COPIES * 4 * heads * length * length)))


def _bits_per_weight(config: ModelConfig, scheme: Scheme | None) -> float:
    """Average over the decoder's linear layers that the scheme quantizes; 16 if it quantizes none."""
    formats = {} if scheme is None else scheme.formats(config)
    quantized = {m: shape for m, shape in linear_shapes(config).items() if m in formats and m != HEAD_MODULE}
    nbytes = sum(formats[module].device_nbytes(shape, 2) for module, shape in quantized.items())
    return 8 * nbytes / sum(map(prod, quantized.values())) if quantized else 16.0
