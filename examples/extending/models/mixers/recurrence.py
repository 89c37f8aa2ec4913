"""A gated linear recurrence (Mamba-2's form, arXiv 2405.21060, section 5): a matrix of fixed size for each head.

    S_t = a_t S_{t-1} + k_t v_t^T,    y_t = q_t S_t / sqrt d,    a_t = sigmoid(w x_t): one number a token and head

For S tokens at once, with L_t = sum_{s<=t} log a_s, where a token of padding has log a = 0 and k = 0:

    y_t = sum_{s<=t} exp(L_t - L_s) (q_t . k_s) v_s / sqrt d + exp(L_t) q_t S_0 / sqrt d
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ...io.fields import Count
from ...ops.cache import Buffer
from ..graph import Cache, Graph, Value
from ..layers.masks import real_tokens
from ..layers.rope import Rope
from ..layers.state import Carried, FixedState, State
from . import KVBuffers, Mixer, MixerOptions, Operations, Place


@dataclass(frozen=True)
class Options(MixerOptions):
    num_heads: Count
    head_dim: Count

    def module(self, place: Place) -> Recurrence:
        return Recurrence(self, place)

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        return (Buffer("memory", "float32", (self.num_heads, self.head_dim, self.head_dim)),)

    def operations(self, context: int, low_bit: bool) -> Operations:
        return Operations(matrix=3 * self.num_heads * self.head_dim**2)


class Recurrence(Mixer):
    def __init__(self, options: Options, place: Place) -> None:
        self.num_heads, self.head_dim = options.num_heads, options.head_dim
        width = options.num_heads * options.head_dim
        super().__init__(place, width, q_proj=width, k_proj=width, v_proj=width, decay_proj=options.num_heads)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        names = ("q_proj", "k_proj", "v_proj")
        projected = (self.get_submodule(name)(x).float().unflatten(-1, (-1, self.head_dim)) for name in names)
        query, key, value = (heads.transpose(1, 2) for heads in projected)  # [B, H, S, d]
        decay = F.logsigmoid(self.get_submodule("decay_proj")(x).float()).transpose(1, 2)  # [B, H, S]
        if (real := real_tokens(mask, x.shape[1])) is not None:
            key, decay = key * real[:, None, :, None], decay * real[:, None]
        total = decay.cumsum(-1)
        apart = (total[..., None] - total[..., None, :]).exp().tril()  # [B, H, S, S]
        output = (query @ key.mT * apart) @ value
        if state is not None:
            assert isinstance(state, FixedState)
            (memory,) = state.tensors
            output = output + total.exp()[..., None] * (query @ memory)
            left = (total[..., -1:] - total).exp()[..., None]  # [B, H, S, 1]
            state.tensors = (total[..., -1, None, None].exp() * memory + (key * left).mT @ value,)
        return (output * self.head_dim**-0.5).to(x.dtype).transpose(1, 2).flatten(2)

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        def projected(name: str, shape: list[int], order: list[int]) -> Value:
            product = g.cast(g.linear(x, self.get_submodule(name), name), np.float32)
            return g.op("Transpose", [g.op("Reshape", [product, g.const(shape)])], perm=order)

        heads, rows, columns = [0, 0, self.num_heads, self.head_dim], [0, 2, 1, 3], [0, 2, 3, 1]
        query, value = projected("q_proj", heads, rows), projected("v_proj", heads, rows)  # [B, H, S, d]
        key = projected("k_proj", heads, columns)  # [B, H, d, S]
        decay = g.op("Log", [g.op("Sigmoid", [projected("decay_proj", [0, 0, self.num_heads, 1], rows)])])
        real = g.op("Unsqueeze", [g.cast(g.real_tokens, np.float32), g.const([1, 2])])  # [B, 1, 1, S]
        key = g.op("Mul", [key, real])
        decay = g.op("Mul", [decay, g.op("Transpose", [real], perm=[0, 1, 3, 2])])  # [B, H, S, 1]
        total = g.op("CumSum", [decay, g.const(2)])
        across = g.op("Transpose", [total], perm=[0, 1, 3, 2])  # [B, H, 1, S]
        apart = g.op("Trilu", [g.op("Exp", [g.op("Sub", [total, across])])], upper=0)
        output = g.op("MatMul", [g.op("Mul", [g.op("MatMul", [query, key]), apart]), value])
        before = g.op("Mul", [g.op("Exp", [total]), g.op("MatMul", [query, past["memory"]])])
        last = g.op("Gather", [total, g.const([-1])], axis=2)  # [B, H, 1, 1]
        kept = g.op("Mul", [g.op("Exp", [last]), past["memory"]])
        added = g.op("MatMul", [g.op("Mul", [key, g.op("Exp", [g.op("Sub", [last, across])])]), value])
        output = g.op("Mul", [g.op("Add", [output, before]), g.const(self.head_dim**-0.5, np.float32)])
        output = g.op(
            "Reshape", [g.op("Transpose", [output], perm=rows), g.const([0, 0, self.num_heads * self.head_dim])]
        )
        return g.cast(output, g.dtype), {"memory": g.op("Add", [kept, added])}
