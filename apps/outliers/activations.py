"""Measures how large a model's activations get. Low bits depend on it: the largest value sets an absmax scale, and
numbers small relative to it are rounded away.

Measured as in Table 5 of arXiv 2410.05258, over all layers and over each layer, on the tokens of evaluation windows:

- attention logits: q k^T / sqrt d, fp32, before the mask and the softmax, only for a real query that may see a real
  key. A differential model has two logits per head, so its sub-heads 2i (signal) and 2i+1 (noise) both count.
- hidden states: the residual stream as each decoder block returns it, [B, S, hidden], real tokens only, without the
  outputs of the embedding and the final norm.

Reported for |x|: the 1st, 2nd, 3rd, 10th and 100th largest value, the median, and the position of the largest; for x:
mean, standard deviation and kurtosis (3 for a normal distribution, 1.8 for a uniform one; outliers push it into the
hundreds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...calib_data import Windows
from ...io.progress import track
from ...models import Decoder
from ...models.attention import Attention
from .statistics import MEDIAN_ERROR, Location, Statistics, Summary

Hook = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, heads, S, T], bool [B, 1, S, T]: where a query may look) -> logits"""


@dataclass(frozen=True)
class Site(Summary):
    """All layers together, and each layer that has such numbers: a layer without attention has no logits."""

    layers: tuple[Summary, ...]


@dataclass(frozen=True)
class OutlierReport:
    """Activations of one model on some windows."""

    model: str
    attention: str  # softmax, diff_v1, ...
    windows: int
    tokens: int
    median_relative_error: float
    attention_logits: Site | None  # None: no layer has attention
    hidden_states: Site

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, which drawing.py and the report of `diffbit compare` take."""
        return asdict(self)

    def layer_rows(self) -> list[dict[str, Any]]:
        """Return a row per layer: maximum, median, kurtosis and the place of the maximum, of logits and hidden
        states."""
        logits_of = {logits.layer: logits for logits in self.attention_logits.layers} if self.attention_logits else {}
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
        | {f"top-{rank}": value for rank, value in site.top.items()}
        | {"median": site.median, "max/median": site.ratio, "kurtosis": site.kurtosis}
        | {"largest_at": f"layer {site.layer}, {unit} {site.place.unit}, token {site.place.position}"}
        for activations, unit, model, site in sites
        if site is not None
    ]


def measure(decoder: Decoder, windows: Windows, batch_size: int = 8, *, name: str = "model") -> OutlierReport:
    """Run the model over the windows, without gradients, and summarize its attention logits and hidden states.

    Attention computes its logits explicitly, so a batch needs batch_size * heads * length^2 fp32 numbers. A model with
    low-bit attention logits keeps them; the numbers before their rounding are measured.
    """
    layers = list(decoder.model.layers)
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
        attention_logits=_site(logits) if any(layer.count for layer in logits) else None,
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

            def see_logits(x: Tensor, valid: Tensor, index: int = index, before: Hook | None = None) -> Tensor:
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


def _logit_place(window: int, pairs: Tensor, index: int) -> Location:
    """Number `index` of [heads, n], where pairs [n, 2] are the (query, key) positions."""
    position, key = pairs[index % len(pairs)].tolist()
    return Location(window, position, index // len(pairs), key)


def _hidden_place(first_window: int, tokens: Tensor, width: int, index: int) -> Location:
    """Number `index` of [n, width], where tokens [n, 2] are (row of the batch, position)."""
    row, position = tokens[index // width].tolist()
    return Location(first_window + row, position, index % width)


def _site(layers: Sequence[Statistics]) -> Site:
    """Return all layers together, with the layer that holds the largest value (the first of equals)."""
    pooled = Statistics()
    for layer in layers:
        pooled.merge(layer)
    total = pooled.summary()
    summaries = tuple(replace(one.summary(), layer=index) for index, one in enumerate(layers) if one.count)
    first = next(summary for summary in summaries if summary.max == total.max)
    return Site(**vars(total) | {"layer": first.layer, "place": first.place, "layers": summaries})
