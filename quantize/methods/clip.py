"""Rounds to nearest with clipped ranges that minimise the error on calibration tokens.

For each group of columns w, with G the input's Gram matrix of these columns, it chooses among the scales and zero
points of quantize/calibration/scales.py those with the least error of the group's contribution to the output,

    d G d^T,    d = decode(encode(w)) - w

This is how AWQ clips (arXiv 2306.00978, the authors' code), with a Gram matrix in place of tokens. It treats the errors
of different groups as independent; "gptq" does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats import Format, QTensor
from ...io.errors import DiffbitError
from ..calibration import least
from . import Method


def quantize(weight: Tensor, format: Format, stats: Any) -> QTensor:
    """Round weight [N, K] of any float dtype; stats: CalibStats of the layer's input."""
    if stats is None:
        raise DiffbitError("clip needs calibration tokens; pass a text, such as --calibrate mix")
    weight = weight.float()
    blocks = gram_blocks(stats.gram.to(weight.device), format)

    def error(lost: Tensor) -> Tensor:
        lost = lost.transpose(0, 1)  # [G, n, group]
        return (torch.bmm(lost, blocks) * lost).sum(-1).T

    return format.nearest(weight, *least(weight, format, error))


def gram_blocks(gram: Tensor, format: Format) -> Tensor:
    """Return the diagonal blocks [G, group, group] of [K, K], padded with zeros if the last group is short."""
    size = format.group_size or len(gram)
    blocks = gram.new_zeros(-(-len(gram) // size), size, size)
    for g in range(len(blocks)):
        block = gram[g * size : (g + 1) * size, g * size : (g + 1) * size]
        blocks[g, : len(block), : len(block)] = block
    # unused channels get a small weight, because a group of only unused channels would otherwise have no error at all
    blocks.diagonal(dim1=1, dim2=2).add_(1e-3 * gram.diagonal().mean().clamp(min=1e-30))
    return blocks


METHOD = Method("clip", __doc__, round=quantize, calibrated=True)
