"""Rounding to nearest with ranges that err least on calibration tokens, instead of those that reach the largest weight.

Each group of columns w, with G the block of the input's Gram matrix that belongs to them, takes of the scales and zero
points of scales.py those with the least error of what the group adds to the output,

    d G d^T,    d = decode(encode(w)) - w

which is how AWQ clips (arXiv 2306.00978, the authors' code), without its tokens. Groups are taken to err
independently of each other; "gptq" knows that they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import DiffbitError
from .. import scales
from ..formats import Format, QTensor

CALIBRATED = True


def quantize(weight: Tensor, format: Format, stats: Any) -> QTensor:
    """weight [N, K] of any float dtype, stats: CalibStats of the layer's input."""
    if stats is None:
        raise DiffbitError("clip needs calibration tokens; name a text to take them from (--calibrate mix)")
    weight = weight.float()
    blocks = gram_blocks(stats.gram.to(weight.device), format)

    def error(lost: Tensor) -> Tensor:
        lost = lost.transpose(0, 1)  # [G, n, group]
        return (torch.bmm(lost, blocks) * lost).sum(-1).T

    return format.nearest(weight, *scales.least(weight, format, error))


def gram_blocks(gram: Tensor, format: Format) -> Tensor:
    """[K, K] -> [G, group, group]: the blocks on the diagonal, zeros where a last group is short."""
    size = format.group_size or len(gram)
    blocks = gram.new_zeros(-(-len(gram) // size), size, size)
    for g in range(len(blocks)):
        block = gram[g * size : (g + 1) * size, g * size : (g + 1) * size]
        blocks[g, : len(block), : len(block)] = block
    # a channel that calibration never saw still has a say, or a group of such would have none at all
    blocks.diagonal(dim1=1, dim2=2).add_(1e-3 * gram.diagonal().mean().clamp(min=1e-30))
    return blocks
