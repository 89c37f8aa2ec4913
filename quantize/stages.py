"""A layer's weights rounded one after the other, some rows at a time, which processes share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from .formats import Format, QTensor
from .layer import Layer, table_rows
from .model import Method, quantize_weight
from .stats import CalibStats, proxy_loss

ROWS = 1024  # of a weight, about, that are rounded at a time


def round_stages(layer: Layer, method: Callable[[str], Method], whole: Collection[str] = ()) -> dict[str, QTensor]:
    """Round each linear layer by the method for its name, with statistics behind those rounded before.

    whole: weights that a method does not round row by row.
    """
    assert layer.tokens is not None
    quantized: dict[str, QTensor] = {}
    for stage in layer.stages():
        stats = layer.stats(quantized, stage[:1])[stage[0]]
        quantized |= round_all(layer, method, stage, stats, whole)
        if layer.tokens.measuring:
            for name in stage:
                exact, rounded = layer.probe().tensors[f"{name}.weight"], layer.probed(quantized)[name]
                layer.proxy_losses[name] = proxy_loss(exact, rounded, stats.gram, layer.here)
    return quantized


def round_all(
    layer: Layer,
    method: Callable[[str], Method],
    names: Iterable[str],
    stats: CalibStats | None = None,
    whole: Collection[str] = (),
) -> dict[str, QTensor]:
    """Round these weights by the method for their name, some rows at a time, which processes share."""
    weights = {name: layer.weight(name) for name in names}
    parts = [
        (name, rows)
        for name, weight in weights.items()
        for rows in ([slice(0, len(weight))] if name in whole else _parts(layer, weight, layer.formats[name]))
    ]
    unit = 1 if layer.tokens is None else len(layer.tokens.slices)  # a weight takes as long as a pass of the tokens

    def rounded(part: tuple[str, slice]) -> QTensor:
        name, rows = part
        return quantize_weight(method(name), f"{name}.weight", weights[name][rows], layer.formats[name], stats)

    quantized: dict[str, QTensor] = {}
    for (name, rows), part in zip(parts, layer.here.share(parts, rounded), strict=True):
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
            layer.step(name, unit)
    return quantized


def _parts(layer: Layer, weight: Tensor, format: Format) -> list[slice]:
    """Rows of a weight that are rounded at a time: methods compute in float32, and of a table a part at a time."""
    rows = len(weight)
    most = rows if format.per_tensor else ROWS if layer.is_layer else table_rows(weight)
    size = -(-rows // -(-rows // most))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _empty(like: QTensor, rows: int, columns: int) -> QTensor:
    """Space for a weight [rows, columns] of which `like` are some rows."""
    format, device = like.format, like.codes.device
    shape = format.scale_shape((rows, columns))
    return QTensor(
        format,
        (rows, columns),
        torch.empty(rows, columns, dtype=torch.uint8, device=device),
        torch.empty(shape, device=device),
        None if format.symmetric else torch.empty(shape, dtype=torch.uint8, device=device),
    )
