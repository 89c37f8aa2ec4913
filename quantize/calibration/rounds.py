"""Rounds the weights of a layer one after the other. Processes share the rows of each weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...formats import Format, QTensor
from ..layer import Layer, Round, quantize_weight, table_rows
from .passes import Passes
from .stats import CalibStats, proxy_loss

ROWS = 1024  # approximate number of rows of a weight to round at a time


def round_stages(layer: Layer, passes: Passes, method: Callable[[str], Round]) -> dict[str, QTensor]:
    """Round each linear layer with method(name), on statistics of inputs computed with the already rounded layers."""
    assert passes.tokens is not None
    quantized: dict[str, QTensor] = {}
    for stage in layer.stages():
        weighed = any(name in passes.tokens.weights for name in stage)
        stats = passes.stats(quantized, stage if weighed else stage[:1])
        stats_of = {name: stats.get(name, stats[stage[0]]) for name in stage}
        for shared in dict.fromkeys(stats_of.values()):
            names = [name for name in stage if stats_of[name] is shared]
            quantized |= round_all(layer, passes, method, names, shared)
        if passes.tokens.measuring:
            for name in stage:
                exact, rounded = layer.probe().tensors[f"{name}.weight"], layer.probed(quantized)[name]
                passes.proxy_losses[name] = proxy_loss(exact, rounded, stats_of[name].gram, passes.workers)
    return quantized


def round_all(
    layer: Layer,
    passes: Passes,
    method: Callable[[str], Round],
    names: Iterable[str],
    stats: CalibStats | None = None,
) -> dict[str, QTensor]:
    """Round each layer in `names` with method(name), some rows at a time."""
    weights = {name: layer.weight(name) for name in names}
    parts = [(name, rows) for name, weight in weights.items() for rows in _parts(layer, weight, layer.formats[name])]

    def rounded(part: tuple[str, slice]) -> QTensor:
        name, rows = part
        return quantize_weight(method(name), f"{name}.weight", weights[name][rows], layer.formats[name], stats)

    quantized: dict[str, QTensor] = {}
    for (name, rows), part in zip(parts, passes.workers.share(parts, rounded), strict=True):
        count, width = weights[name].shape
        if len(part.codes) == count:
            quantized[name] = part
        else:
            into = quantized.setdefault(name, _empty(part, count, width)).rows(rows)
            into.codes.copy_(part.codes)
            into.scale.copy_(part.scale)
            if into.zero is not None and part.zero is not None:
                into.zero.copy_(part.zero)
        if rows.stop >= count:
            passes.step(name, passes.batches)
    return quantized


def _parts(layer: Layer, weight: Tensor, format: Format) -> list[slice]:
    """Return slices of rows to round at a time. They limit the memory of methods, which compute in float32."""
    rows = len(weight)
    limit = rows if format.per_tensor else ROWS if layer.is_layer else table_rows(weight.shape[1])
    size = -(-rows // -(-rows // limit))
    size += -size % format.rows_together
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _empty(like: QTensor, rows: int, columns: int) -> QTensor:
    """Allocate a QTensor [rows, columns] with the format and device of `like`."""
    format, device = like.format, like.codes.device
    shape = format.scale_shape((rows, columns))
    return QTensor(
        format,
        (rows, columns),
        torch.empty(rows, columns, dtype=torch.uint8, device=device),
        torch.empty(shape, device=device),
        None if format.symmetric else torch.empty(shape, dtype=torch.uint8, device=device),
    )
