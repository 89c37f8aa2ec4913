"""Gated memory unit (SambaY, arXiv 2507.06607, section 2.1): a layer that reads another's memory and keeps nothing.

    y = m * silu(W_in x)

followed by o_proj; m [B, S, C] is the memory of layer `memory_of`, a Mamba layer (mamba.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ...io.fields import Count
from ...ops.cache import TOKENS, Buffer
from ..graph import Cache, Graph, Value
from ..layers import Carried, Rope, State
from ._mixer import KVBuffers, Mixer, MixerOptions, Operations, Place


@dataclass(frozen=True)
class Options(MixerOptions):
    inner_size: Count
    memory_of: int  # the layer, from 0

    def module(self, place: Place) -> GatedMemory:
        return GatedMemory(self, place)

    @property
    def reads(self) -> int:
        return self.memory_of

    @property
    def carried(self) -> tuple[tuple[int | str, ...], ...]:
        return ((TOKENS, self.inner_size),)

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        return ()

    def operations(self, context: int, low_bit: bool) -> Operations:
        return Operations(other=3 * self.inner_size)


class GatedMemory(Mixer):
    in_proj: nn.Module

    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(place, options.inner_size, in_proj=options.inner_size)
        self.memory_of = options.memory_of

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        """carried: contains m [B, S, C]."""
        (memory,) = carried[self.memory_of]
        return memory * F.silu(self.in_proj(x))

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        memory = g.carried[self.memory_of]["memory"]
        gate = g.linear(x, self.in_proj, "in_proj")
        return g.op("Mul", [memory, g.op("Mul", [gate, g.op("Sigmoid", [gate])])]), {}
