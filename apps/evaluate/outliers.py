"""Measures how large a model's activations get. Low bits depend on it: the largest value sets an absmax scale, and
numbers small relative to it are rounded away.

Measured as in Table 5 of arXiv 2410.05258, over all layers and over each layer, on the tokens of evaluation windows:

- attention logits: q k^T / sqrt d, fp32, before the mask and the softmax, only for a real query that may see a real
  key. A differential model has two logits per head, so its sub-heads 2i (signal) and 2i+1 (noise) both count.
- hidden states: the residual stream as each decoder block returns it, [B, S, hidden], real tokens only, without the
  outputs of the embedding and the final norm.

Reported for |x|: the 1st, 2nd, 3rd, 10th and 100th largest value, the median, and the position of the largest; for x:
mean, standard deviation and kurtosis E[(x-mean)^4] / E[(x-mean)^2]^2 (3 for a normal distribution, 1.8 for a uniform
one; outliers push it into the hundreds).

No activation is kept. `Statistics` is a summary that numbers can be added to and that can be merged with another:

- the 100 largest are exact: those of a union are among the 100 largest of its parts;
- the moments are merged in float64 (Pébay's pairwise update, Sandia report SAND2008-6212): exact but for rounding;
- the median comes from a histogram over the bit patterns of fp32 magnitudes, which grow with the magnitude. Nine bits
  of the fraction are kept, so that a bin is at most 2^-9 of its lower edge wide and the bin's middle is within
  2^-10 < 0.1 % of the true median, whatever the range. Below 2^-126, the smallest normal number, the median is 0.

Counts, largest values, histogram and place merge to the same result in any order and grouping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...calib_data import Windows
from ...io.errors import DiffbitError
from ...io.progress import track
from ...models import Decoder
from ...models.layers.attention import Attention
from ...models.layers.softmax import LogitsHook

RANKS = (1, 2, 3, 10, 100)  # of the largest values, as in Table 5
FRACTION_BITS = 9  # bits of fp32's 23-bit fraction that determine a number's bin
MEDIAN_ERROR = 2.0 ** -(FRACTION_BITS + 1)  # relative
_SHIFT = 23 - FRACTION_BITS
_BINS = 255 << FRACTION_BITS  # every finite fp32 magnitude has one
_CHUNK = 1 << 22  # numbers that are turned into float64 at a time


@dataclass(frozen=True, order=True)
class Place:
    """The position of a value: window, token in it, channel (hidden states) or sub-head (logits), key token."""

    window: int
    position: int
    unit: int
    key: int | None = None  # attention logits only: the key's token


@dataclass(frozen=True)
class Summary:
    """Statistics of a set of numbers x, which are not kept."""

    count: int
    top: dict[str, float | None]  # {rank: the rank-th largest |x|} for RANKS; None if there are fewer numbers
    median: float  # of |x|, within MEDIAN_ERROR of the true one
    ratio: float | None  # largest / median
    mean: float
    std: float
    kurtosis: float | None  # None if all numbers are equal
    layer: int | None  # of the largest |x|
    place: Place  # of the largest |x|; the first in reading order where several are equal

    @property
    def max(self) -> float:
        assert self.top["1"] is not None
        return self.top["1"]


@dataclass(frozen=True)
class Site(Summary):
    """All layers together, and each layer that has such numbers: a layer without attention has no logits."""

    layers: tuple[Summary, ...]


class Statistics:
    """Accumulates statistics (see the module's docstring) in about 1 MB, however many numbers are added."""

    def __init__(self, what: str = "numbers") -> None:
        self.what = what  # for errors
        self.count = 0
        self.mean = self.m2 = self.m3 = self.m4 = 0.0  # central moments, not divided by the count
        self.top = torch.empty(0)  # fp32, falling, at most RANKS[-1]
        self.histogram = torch.zeros(_BINS, dtype=torch.int64)
        self.place: Place | None = None

    def update(self, values: Tensor, place: Callable[[int], Place]) -> None:
        """Add numbers [n] of any float dtype; `place(i)` is the position of number i, and increases with i."""
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK].float()
            magnitude, part = chunk.abs(), Statistics()
            part.count = len(chunk)
            part.top = magnitude.topk(min(RANKS[-1], part.count)).values.cpu()
            if not part.top[0].isfinite():
                raise DiffbitError(
                    f"{self.what}: the activations hold NaN or infinity; the model is damaged, or its dtype too narrow "
                    "for it"
                )
            part.place = place(start + int((magnitude == magnitude.max()).nonzero()[0]))
            part.histogram = torch.bincount(magnitude.view(torch.int32) >> _SHIFT, minlength=_BINS).cpu()
            exact = chunk.double()
            part.mean = exact.mean().item()
            exact = exact - part.mean
            square = exact.square()
            part.m2, part.m3, part.m4 = (power.sum().item() for power in (square, square * exact, square.square()))
            self.merge(part)

    def merge(self, other: Statistics) -> None:
        """Add the numbers of `other`."""
        if not other.count:
            return
        n, m = self.count, other.count
        if not n or other.top[0] > self.top[0]:
            self.place = other.place
        elif other.top[0] == self.top[0]:
            assert self.place is not None and other.place is not None
            self.place = min(self.place, other.place)
        self.top = torch.cat((self.top, other.top)).sort(descending=True).values[: RANKS[-1]]
        self.histogram += other.histogram

        total, delta = n + m, other.mean - self.mean
        a2, a3, b2, b3 = self.m2, self.m3, other.m2, other.m3
        self.m4 += other.m4 + delta**4 * (n * m * (n * n - n * m + m * m) / total**3)
        self.m4 += 6 * delta**2 * (n * n * b2 + m * m * a2) / total**2 + 4 * delta * (n * b3 - m * a3) / total
        self.m3 += b3 + delta**3 * (n * m * (n - m) / total**2) + 3 * delta * (n * b2 - m * a2) / total
        self.m2 += b2 + delta**2 * (n * m / total)
        self.mean += delta * m / total
        self.count = total

    def summary(self) -> Summary:
        if not self.count or self.place is None:
            raise DiffbitError("there is nothing to measure: the windows contain no token; give more text")
        largest, median, variance = self.top.tolist(), self.median(), self.m2 / self.count
        return Summary(
            count=self.count,
            top={str(rank): largest[rank - 1] if rank <= len(largest) else None for rank in RANKS},
            median=median,
            ratio=largest[0] / median if median else None,
            mean=self.mean,
            std=math.sqrt(variance),
            kurtosis=self.m4 / self.count / variance**2 if variance else None,
            layer=None,
            place=self.place,
        )

    def median(self) -> float:
        """Return the median of |x|, within MEDIAN_ERROR; for an even count the mean of the middle two, as in numpy."""
        middle = torch.tensor([(self.count - 1) // 2, self.count // 2])
        bins = torch.searchsorted(self.histogram.cumsum(0), middle, right=True)
        bits = (bins << _SHIFT) + (1 << (_SHIFT - 1))  # the fraction's middle is the bin's middle
        values = torch.where(bins < 1 << FRACTION_BITS, 0.0, bits.int().view(torch.float32))
        return values.double().mean().item()


@dataclass(frozen=True)
class OutlierReport:
    """Activations of one model on some windows."""

    model: str
    attention: str  # softmax, diff_v1, ...
    windows: int
    tokens: int
    median_relative_error: float
    attention_logits: Site
    hidden_states: Site

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, which plots.py and report.py take."""
        return asdict(self)

    def layer_rows(self) -> list[dict[str, Any]]:
        """A row per layer: maximum, median, kurtosis and the place of the maximum, of logits and hidden states."""
        logits_of = {logits.layer: logits for logits in self.attention_logits.layers}
        layers = ((logits_of.get(hidden.layer), hidden) for hidden in self.hidden_states.layers)
        return [
            {
                "model": self.model,
                "layer": hidden.layer,
                "logits_max": logits and logits.max,
                "logits_median": logits and logits.median,
                "logits_kurtosis": logits and logits.kurtosis,
                "head": logits and logits.place.unit,
                "hidden_max": hidden.max,
                "hidden_median": hidden.median,
                "hidden_kurtosis": hidden.kurtosis,
                "channel": hidden.place.unit,
                "position": hidden.place.position,
            }
            for logits, hidden in layers
        ]


def rows(reports: Sequence[OutlierReport]) -> list[dict[str, Any]]:
    """Models side by side as in Table 5: the attention logits of each, then the hidden states of each."""
    sites = [("attention logits", "head", report.model, report.attention_logits) for report in reports]
    sites += [("hidden states", "channel", report.model, report.hidden_states) for report in reports]
    return [
        {"activations": activations, "model": model}
        | {f"top-{rank}": value for rank, value in found.top.items()}
        | {"median": found.median, "max/median": found.ratio, "kurtosis": found.kurtosis}
        | {"largest_at": f"layer {found.layer}, {unit} {found.place.unit}, token {found.place.position}"}
        for activations, unit, model, found in sites
    ]


def measure(decoder: Decoder, windows: Windows, batch_size: int = 8, *, name: str = "model") -> OutlierReport:
    """Run the model over the windows, without gradients, and summarize its attention logits and hidden states.

    Attention computes its logits explicitly, so a batch needs batch_size * heads * length^2 fp32 numbers. A model with
    low-bit attention logits keeps them; the numbers before their rounding are measured.
    """
    layers = list(decoder.model.layers)
    if not any(isinstance(layer.get_submodule("self_attn"), Attention) for layer in layers):
        raise DiffbitError(f"{name}: no layer has attention, so there are no attention logits to measure")
    logits, hidden = (
        [Statistics(f"{name}: {what} of layer {index}") for index in range(len(layers))]
        for what in ("attention logits", "hidden states")
    )
    device = next(decoder.parameters()).device
    start, real = 0, torch.empty(0)  # of the batch: its first window; bool [B, S], tokens that are not padding

    def on_logits(layer: int, x: Tensor, valid: Tensor) -> None:
        valid = (valid & real[:, None, :, None])[:, 0]  # [B, S, T]: excludes padding as query; keys are masked already
        for row, (values, seen) in enumerate(zip(x, valid, strict=True)):  # [heads, S, T], [S, T]
            place = partial(_logit_place, start + row, seen.nonzero())
            logits[layer].update(values[:, seen].flatten(), place)

    def on_hidden(layer: int, x: Tensor) -> None:
        place = partial(_hidden_place, start, real.nonzero(), x.shape[-1])
        hidden[layer].update(x[real].flatten(), place)

    with torch.inference_mode(), _observed(layers, on_logits, on_hidden):
        for start in track(range(0, len(windows.ids), batch_size), f"outliers of {name}"):
            batch = slice(start, start + batch_size)
            ids, real = (torch.from_numpy(array[batch]).to(device) for array in (windows.ids, windows.mask))
            decoder(ids, attention_mask=None if real.all() else real.long())
    return OutlierReport(
        model=name,
        attention=decoder.config.attention,
        windows=len(windows.ids),
        tokens=int(windows.mask.sum()),
        median_relative_error=MEDIAN_ERROR,
        attention_logits=_site(logits),
        hidden_states=_site(hidden),
    )


@contextmanager
def _observed(
    layers: Sequence[nn.Module],
    on_logits: Callable[[int, Tensor, Tensor], None],
    on_hidden: Callable[[int, Tensor], None],
) -> Iterator[None]:
    """Install hooks on every layer while the context lasts; existing hooks keep working."""
    with ExitStack() as undo:
        for index, layer in enumerate(layers):

            def see_logits(x: Tensor, valid: Tensor, index: int = index, before: LogitsHook | None = None) -> Tensor:
                on_logits(index, x, valid)
                return x if before is None else before(x, valid)

            def see_hidden(module: nn.Module, args: Any, output: Tensor, index: int = index) -> None:
                on_hidden(index, output)

            attention = layer.get_submodule("self_attn")
            if isinstance(attention, Attention):
                before = attention.logits_hook
                attention.logits_hook = partial(see_logits, before=before)
                undo.callback(setattr, attention, "logits_hook", before)
            undo.callback(layer.register_forward_hook(see_hidden).remove)
        yield


def _logit_place(window: int, pairs: Tensor, index: int) -> Place:
    """Number `index` of [heads, n], where pairs [n, 2] are the (query, key) positions."""
    position, key = pairs[index % len(pairs)].tolist()
    return Place(window, position, index // len(pairs), key)


def _hidden_place(first_window: int, tokens: Tensor, width: int, index: int) -> Place:
    """Number `index` of [n, width], where tokens [n, 2] are (row of the batch, position)."""
    row, position = tokens[index // width].tolist()
    return Place(first_window + row, position, index % width)


def _site(layers: Sequence[Statistics]) -> Site:
    """All layers together, with the layer that holds the largest value (the first of equals)."""
    pooled = Statistics()
    for layer in layers:
        pooled.merge(layer)
    whole = pooled.summary()
    index = next(index for index, found in enumerate(layers) if found.count and found.top[0] == whole.max)
    own = tuple(replace(found.summary(), layer=i) for i, found in enumerate(layers) if found.count)
    return Site(**vars(whole) | {"layer": index, "place": layers[index].place, "layers": own})
