"""Mamba-1 (arXiv 2312.00752, section 3.4): a state of fixed size per channel, with input-dependent updates.

    (u, z) = W_in x                                 C channels each
    u      = silu(conv(u))                          causal, K tokens, depthwise: ops/causal_conv.py
    (d, B, C) = W_x u;   dt = W_dt d + b            d has rank R, B and C have N numbers (this C is not the channels)
    m, h   = scan(u, dt, B, C)                      A = -exp(A_log), D: ops/selective_scan.py
    y      = m * silu(z),   then o_proj

Later gated memory units read m (gmu.py). x_proj and dt_proj do not read the residual stream, so methods do not change
their inputs (`inner`). Weights have the layout of the authors' checkpoints; a state is [N, C].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from ...io.fields import Count, bounds
from ...ops import causal_conv, selective_scan
from ...ops.cache import TOKENS, Buffer
from ..graph import Cache, Graph, Value
from ..layers import Carried, FixedState, Rope, State, real_tokens
from ._mixer import KVBuffers, Mixer, MixerOptions, Operations, Place


@dataclass(frozen=True)
class Options(MixerOptions):
    inner_size: Count  # C
    state_size: Count  # N
    conv_width: Annotated[int, bounds(2, 1 << 31, "2 or more: a convolution over a single token has no state")]  # K
    dt_rank: Count  # R

    def module(self, place: Place) -> Mamba:
        return Mamba(self, place)

    @property
    def carried(self) -> tuple[tuple[int | str, ...], ...]:
        return ((TOKENS, self.inner_size),)

    @property
    def inner(self) -> tuple[str, ...]:
        return "x_proj", "dt_proj"

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        """Return the last K - 1 tokens before the convolution, and the scan's h."""
        return (
            Buffer("conv", "float32", (self.conv_width - 1, self.inner_size), "native"),
            Buffer("scan", "float32", (self.state_size, self.inner_size), "native"),
        )

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Count three operations per number of h (decay, update, read); exponentials and SiLUs are `other`."""
        matrix = (3 * self.state_size + self.conv_width) * self.inner_size
        return Operations(matrix=matrix, other=(self.state_size + 8) * self.inner_size)


class Mamba(Mixer):
    in_proj: nn.Module

    def __init__(self, options: Options, place: Place) -> None:
        width, states = options.inner_size, options.state_size
        super().__init__(place, width, in_proj=2 * width)
        self.options = options
        self.conv1d = nn.Conv1d(width, width, options.conv_width, groups=width)  # only its parameters are used
        self.x_proj = nn.Linear(width, options.dt_rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(options.dt_rank, width)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))  # [C, N], as S4D begins
        self.D = nn.Parameter(torch.ones(width))

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        """carried: m is added to it for later layers."""
        options, real = self.options, real_tokens(mask, x.shape[1])
        fixed = options.state(len(x), 0, x.dtype, x.device) if state is None else state
        assert isinstance(fixed, FixedState)
        past_conv, past_scan = fixed.tensors
        u, z = self.in_proj(x).chunk(2, -1)
        u, conv = causal_conv.reference(u, *self._conv(), past_conv, real)
        dt, b, c = self.x_proj(u).split((options.dt_rank, options.state_size, options.state_size), -1)
        y, memory, scan = selective_scan.reference(
            u, self.dt_proj(dt), z, b, c, self._decay_rates(), self.D, past_scan, real=real
        )
        if state is not None:
            fixed.tensors = conv.detach(), scan.detach()
        if self.gives:
            carried[self.layer_index] = (memory,)
        return y

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        def floats(name: str, tensor: Tensor) -> Value:
            return g.weight(name, tensor.detach().float().contiguous().numpy(), np.float32)

        u, z = g.ops("Split", [g.linear(x, self.in_proj, "in_proj")], 2, axis=-1, num_outputs=2)
        weight, bias = self._conv()
        weights = floats("conv1d.weight", weight), floats("conv1d.bias", bias)
        u, conv = g.customs(
            causal_conv, [u, *weights, g.attention_mask, past["conv"]], 2, lambda _: causal_conv.function()
        )
        sizes = g.const([self.options.dt_rank, self.options.state_size, self.options.state_size])
        dt, b, c = g.ops("Split", [g.linear(u, self.x_proj, "x_proj"), sizes], 3, axis=-1)
        dt = g.linear(dt, self.dt_proj, "dt_proj", bias=False)
        rates, skip = floats("A.weight", self._decay_rates()), floats("D.weight", self.D)
        dt_bias = floats("dt_proj.bias", self.get_parameter("dt_proj.bias"))
        y, memory, scan = g.customs(
            selective_scan,
            [u, dt, z, b, c, rates, skip, dt_bias, g.attention_mask, past["scan"]],
            3,
            lambda _: selective_scan.function(),
        )
        if self.gives:
            g.carried[self.layer_index] = {"memory": memory}
        else:
            memory.name = ""  # omits the output
        return y, {"conv": conv, "scan": scan}

    def _conv(self) -> tuple[Tensor, Tensor]:
        """Return the convolution's weight, [K, C], and bias, [C]."""
        return self.conv1d.weight[:, 0].T, self.get_parameter("conv1d.bias")

    def _decay_rates(self) -> Tensor:
        """A, fp32 [N, C]."""
        return -self.A_log.float().exp().T

    def derived(self) -> dict[str, Tensor]:
        return {"A = -exp(A_log)": self._decay_rates()}
