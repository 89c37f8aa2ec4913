"""Finds weights that lie on the grid of a format of one or two bits: models that were trained in it, and are stored as
floats. That format keeps each of them; any other would round them a second time.

A grid is at most four values in each group of 128, 64 or 32 weights of a row, each within half a unit of bfloat16,
because a file may hold the products of scale and level in 16 bits. What a file stores as ternary codes with one scale
(bitnet.cpp's I2_S) is `ternary`, whose layers round their inputs to int8 as that program does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format, names, parse_format
from ..formats.grid import ROUNDING
from ..io.progress import track
from ..models import Checkpoint
from ..models.checkpoint.names import layer_of
from .methods.rtn import quantize
from .scheme import EMBEDDING_MODULE, HEAD_MODULE, weight_shapes

__all__ = ["ROUNDING", "grid_of", "grids", "loss_of"]

FORMATS = tuple(format for format in map(parse_format, names()) if format.is_grid)
TERNARY = parse_format("ternary")
FEW_ROWS = 8  # that refuse most weights, without the others


def grid_of(weight: Tensor) -> Format | None:
    """Return the format of the fewest bits on whose grid a weight [N, K] lies; None: it is not on one."""
    formats = [format for format in FORMATS if _is_kept(weight[:FEW_ROWS], format)]
    if not formats or not weight.any():
        return None
    formats.sort(key=lambda format: format.nbytes((weight.shape[0], weight.shape[1])))
    return next((format for format in formats if _is_kept(weight, format)), None)


def _is_kept(weight: Tensor, format: Format) -> bool:
    value = quantize(weight, format).dequantize().sub_(weight).abs_()
    return bool((value <= ROUNDING * weight.abs()).all())


def grids(checkpoint: Checkpoint) -> dict[str, Format]:
    """Return {module: format} of the linear layers, the embedding and the head of a float model that lie on a grid. If
    none of the first layer does, the others are not read."""
    config, found = checkpoint.config, dict[str, Format]()
    modules = [module for module in weight_shapes(config) if f"{module}.weight" in checkpoint.names]
    first = [module for module in modules if layer_of(module) == 0]

    def look(module: str) -> None:
        if checkpoint.is_ternary(f"{module}.weight"):
            found[module] = TERNARY
            return
        weight = checkpoint.read(f"{module}.weight")
        if weight.isfinite().all() and (format := grid_of(weight)) is not None:
            found[module] = format

    for module in first:
        look(module)
    for module in track([module for module in modules if found and module not in first], "looking for grids"):
        look(module)
    if config.tie_embeddings and EMBEDDING_MODULE in found:
        found[HEAD_MODULE] = found[EMBEDDING_MODULE]
    return {module: found[module] for module in weight_shapes(config) if module in found}


def loss_of(weight: Tensor, format: Format) -> float:
    """Return the relative error |w - round(w)| / |w| of rounding a weight to nearest."""
    lost = quantize(weight, format).dequantize().sub_(weight)
    return float(torch.linalg.vector_norm(lost) / torch.linalg.vector_norm(weight.float()))
