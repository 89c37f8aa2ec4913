"""A gated convolution over a few tokens (LFM2, arXiv 2511.23404, section 2): the state is the last K - 1 tokens.

    (b, c, x) = W_in x                      C channels each
    y_t = c_t * (bias + sum_k w_k u_(t-K+1+k)),    u = b * x,   k = 0 ... K - 1;    then o_proj

The operator of Mamba's convolution (ops/causal_conv.py), which has kernels and skips padding, ends in SiLU. As
silu(s) - silu(-s) = s, the sum is the difference of two of them, with weights w and -w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from ...io.fields import Count, bounds
from ...ops import causal_conv
from ...ops.cache import Buffer
from ..graph import Cache, Graph, Value
from ..layers import Carried, FixedState, Rope, State, real_tokens
from ._mixer import KVBuffers, Mixer, MixerOptions, Operations, Place


@dataclass(frozen=True)
class Options(MixerOptions):
    """bias: whether in_proj, the convolution and o_proj have one."""

    inner_size: Count  # C
    conv_width: Annotated[int, bounds(2, 1 << 31, "2 or more: a convolution over a single token has no state")]  # K
    bias: bool = False

    def module(self, place: Place) -> ShortConv:
        return ShortConv(self, place)

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        """Return the last K - 1 tokens of u. Never in place: two nodes read them."""
        return (Buffer("conv", "float32", (self.conv_width - 1, self.inner_size)),)

    def operations(self, context: int, low_bit: bool) -> Operations:
        return Operations(matrix=2 * self.conv_width * self.inner_size, other=12 * self.inner_size)


class ShortConv(Mixer):
    in_proj: nn.Module

    def __init__(self, options: Options, place: Place) -> None:
        width, bias = options.inner_size, options.bias
        super().__init__(place, width, in_proj=3 * width, bias=bias, o_bias=bias)
        self.options = options
        self.conv1d = nn.Conv1d(width, width, options.conv_width, groups=width, bias=bias)  # only its parameters

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        real = real_tokens(mask, x.shape[1])
        fixed = self.options.state(len(x), 0, x.dtype, x.device) if state is None else state
        assert isinstance(fixed, FixedState)
        (past,) = fixed.tensors
        b, c, u = self.in_proj(x).float().chunk(3, -1)
        weight, bias = self._conv()
        positive, present = causal_conv.reference(b * u, weight, bias, past, real)
        negative, _ = causal_conv.reference(b * u, -weight, -bias, past, real)
        if state is not None:
            fixed.tensors = (present.detach(),)
        return (c * (positive - negative)).to(x.dtype)

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        projected = g.cast(g.linear(x, self.in_proj, "in_proj"), np.float32)
        b, c, u = g.ops("Split", [projected], 3, axis=-1, num_outputs=3)
        u = g.op("Mul", [b, u])
        weight, bias = (tensor.detach().contiguous().numpy() for tensor in self._conv())
        parts = []
        for name, sign in (("conv1d", 1), ("conv1d.negative", -1)):
            weights = (
                g.weight(f"{name}.{kind}", sign * array, np.float32)
                for kind, array in (("weight", weight), ("bias", bias))
            )
            parts.append(
                g.customs(
                    causal_conv, [u, *weights, g.attention_mask, past["conv"]], 2, lambda _: causal_conv.function()
                )
            )
        (positive, present), (negative, _) = parts
        return g.cast(g.op("Mul", [c, g.op("Sub", [positive, negative])]), g.dtype), {"conv": present}

    def _conv(self) -> tuple[Tensor, Tensor]:
        """Return the convolution's weight, [K, C], and bias, [C], fp32."""
        bias = self.conv1d.bias
        weight = self.conv1d.weight[:, 0].T.float()
        return weight, torch.zeros_like(weight[0]) if bias is None else bias.float()
