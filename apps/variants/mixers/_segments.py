"""Segments of N real tokens, for mixers whose state changes at the first token of a segment. Padding has no place in
them, so each row of a batch has its own: number n of a token, from 0, is place n mod N of its segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from ....io.fields import Count, Rule
from ....models.mixers import FixedState, Graph, MixerOptions, Value, real_tokens


@dataclass(frozen=True)
class SegmentOptions(MixerOptions):
    """Options of such a mixer, whose state is its buffers, zero at first."""

    num_heads: Count
    head_dim: Annotated[int, Rule("an even {} above 0", lambda value: value > 0 and value % 2 == 0)]

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, 2 * pairs

    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> SegmentState:
        return SegmentState(
            *(torch.zeros(batch, *buffer.sizes(0), device=device) for buffer in self.buffers(lambda *_: ()))
        )


class SegmentState(FixedState):
    """Its tensors, and the number of tokens so far, int64 [B, 1]."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.count = torch.zeros(len(tensors[0]), 1, dtype=torch.int64, device=tensors[0].device)

    def reset(self) -> None:
        super().reset()
        self.count = torch.zeros_like(self.count)

    def keep(self, real: Tensor, *tensors: Tensor) -> None:
        """Replace the tensors, after the `real` tokens [B, S]."""
        self.tensors = tuple(tensor.detach() for tensor in tensors)
        self.count = self.count + real.sum(1, keepdim=True)


def segments(x: Tensor, mask: Tensor | None, count: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return (real, segment, place), bool and int64 [B, S], and a number that all segments are below.

    Segment 0 is the one that is not full yet after `count` tokens.
    """
    real = real_tokens(mask, x.shape[1])
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
    number = (count + real.cumsum(1) - 1).clamp(min=0)
    segment = number // size + 1 - (count + size - 1) // size
    return real, segment, number % size, (x.shape[1] - 1) // size + 2


def onnx_places(g: Graph, size: int) -> tuple[Value, Value, Value]:
    """Add nodes of each token's place in its segment, int64 [B, S, 1], and of whether it is real, and whether it is
    real and begins a segment, fp32 [B, S, 1]."""
    before = g.op("Slice", [g.attention_mask, g.const([0]), g.past_length, g.const([1])])
    count = g.op("ReduceSum", [before, g.const([1])])  # [B, 1]
    count = g.op("Add", [count, g.op("CumSum", [g.cast(g.real_tokens, np.int64), g.const(1)])])
    number = g.op("Max", [g.op("Sub", [count, g.const(1)]), g.const(0)])
    place = g.op("Unsqueeze", [g.op("Mod", [number, g.const(size)]), g.const([2])])
    real = g.op("Unsqueeze", [g.real_tokens, g.const([2])])
    begins = g.op("And", [g.op("Equal", [place, g.const(0)]), real])
    return place, g.cast(real, np.float32), g.cast(begins, np.float32)
