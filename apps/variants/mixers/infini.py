"""Infini-attention (arXiv 2404.07143): softmax attention within segments of N tokens, and a memory of those before.

    A_local = softmax(q K^T / sqrt d) V                     over the tokens of this segment up to this one (eq. 2)
    A_mem   = s(q) M / s(q) z,    s(x) = elu(x) + 1         M [d, d], z [d] of the segments before (eq. 3)
    o       = g A_mem + (1 - g) A_local,   g = sigmoid(beta_h)                one number per head (eq. 6)

and at the end of a segment, by the delta rule, where sums are over its tokens t (eq. 4, 5)

    M = M + sum_t s(k_t)^T (v_t - s(k_t) M / s(k_t) z),    z = z + sum_t s(k_t)

z is a column of the memory [M, z], because a value with a 1 behind it adds s(k) to it. What the current segment adds is
kept apart, as `pending`, until the first token of the next. Quotients are 0 while the memory is empty. Only local
queries and keys are rotated (RoPE), as in the paper. A segment is N real tokens, wherever there is padding.

Low bits: those of the weights, and int8 states (quantize/device_cache.py): N keys and values, and 2 d (d + 1) numbers
per head. research/variants has what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from ....io.fields import Count
from ....models.mixers import (
    Buffer,
    Cache,
    Carried,
    Graph,
    KVBuffers,
    Mixer,
    Operations,
    Place,
    Rope,
    State,
    Value,
    apply_rope,
)
from ._segments import SegmentOptions, SegmentState, onnx_places, segments

SMALLEST = 1e-6  # of s(q) z
STATES = "local_key", "local_value", "memory", "pending"


@dataclass(frozen=True)
class Options(SegmentOptions):
    segment: Count = field(default=32, kw_only=True)  # N

    def module(self, place: Place) -> Infini:
        return Infini(self, place)

    @property
    def rope_width(self) -> int:
        return self.head_dim

    @property
    def softmaxes(self) -> int:
        return self.num_heads

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        segment, memory = (self.segment, self.head_dim), (self.head_dim, self.head_dim + 1)
        sizes = zip(STATES, (segment, segment, memory, memory), strict=True)
        return tuple(Buffer(name, "float32", (self.num_heads, *size)) for name, size in sizes)

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Count two reads of the memory and an update; softmax, RoPE, s and the gate are `other`."""
        width, seen = self.num_heads * self.head_dim, min(context, self.segment)
        memory = 3 * width * (self.head_dim + 1)
        return Operations(
            logits=width * seen, matrix=width * seen + memory, other=2 * self.num_heads * seen + 12 * width
        )


class Infini(Mixer):
    def __init__(self, options: Options, place: Place) -> None:
        width = options.num_heads * options.head_dim
        super().__init__(place, width, q_proj=width, k_proj=width, v_proj=width)
        self.options, self.segment = options, options.segment
        self.beta = nn.Parameter(torch.zeros(options.num_heads))

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        names, size = ("q_proj", "k_proj", "v_proj"), self.segment
        query, key, value = (
            self.get_submodule(name)(x).float().unflatten(-1, (self.options.num_heads, -1)) for name in names
        )
        local_query, local_key = (apply_rope(heads, rope[:2]).transpose(1, 2) for heads in (query, key))
        query, key, value = (
            heads.transpose(1, 2) for heads in (F.elu(query) + 1, F.elu(key) + 1, value)
        )  # [B, H, S, d]
        fixed = self.options.state(len(x), 0, x.dtype, x.device) if state is None else state
        assert isinstance(fixed, SegmentState)
        past_key, past_value, memory, pending = fixed.tensors
        real, segment, place, count = segments(x, mask, fixed.count, size)

        places = torch.arange(size, device=x.device)
        old = (segment == 0)[..., None] & (places < fixed.count % size)[:, None]  # [B, S, N]
        new = (segment[..., None] == segment[:, None]).tril() & real[:, None]  # [B, S, S]
        keys, values = torch.cat((past_key, local_key), 2), torch.cat((past_value, value), 2)
        local = F.scaled_dot_product_attention(local_query, keys, values, torch.cat((old, new), -1)[:, None])

        read = torch.zeros_like(local)
        ones = torch.ones_like(value[..., :1])
        for index in range(count):
            inside = (real & (segment == index)).float()[:, None, :, None]
            begins = inside.amax(2, keepdim=True) if index else torch.zeros_like(inside[:, :, :1])
            memory, pending = memory + begins * pending, pending * (1 - begins)
            read = read + inside * _quotient(query @ memory)
            pending = pending + (inside * key).mT @ torch.cat((value - _quotient(key @ memory), ones), -1)
        if state is not None:
            last = real & (segment == segment[:, -1:])
            put = (place[:, None] == places[:, None]) & last[:, None]  # [B, N, S]
            put, stays = put.float()[:, None], ~put.any(-1)[:, None, :, None]
            past_key, past_value = put @ local_key + stays * past_key, put @ value + stays * past_value
            fixed.keep(real, past_key, past_value, memory, pending)
        out = torch.lerp(local, read, self.beta.sigmoid()[:, None, None])
        return out.to(x.dtype).transpose(1, 2).flatten(2)

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        """Add a loop over tokens, in which a head's numbers of a token are [B, H, 1, d]."""

        def number(value: ArrayLike) -> Value:
            return g.const(value, np.float32)

        def quotient(read: Value) -> Value:
            above, below = g.ops("Split", [read, g.const([self.options.head_dim, 1])], 2, axis=-1)
            return g.op("Div", [above, g.op("Max", [below, number(SMALLEST)])])

        def row(value: Value, *axes: int) -> Value:
            return g.op("Unsqueeze", [value, g.const(axes)])

        def transposed(value: Value) -> Value:
            return g.op("Transpose", [value], perm=[0, 1, 3, 2])

        names, by_head = ("q_proj", "k_proj", "v_proj"), g.const([0, 0, self.options.num_heads, -1])
        parts = g.linears(x, {name: self.get_submodule(name) for name in names})
        query, key, value = (g.op("Reshape", [g.cast(part, np.float32), by_head]) for part in parts)  # [B, S, H, d]
        scaled = g.op("Mul", [g.rotated(query), number(self.options.head_dim**-0.5)])
        positive = (g.op("Add", [g.op("Elu", [heads]), number(1)]) for heads in (query, key))
        rows = [row(heads, 3) for heads in (scaled, g.rotated(key), value, *positive)]

        place, real, begins = onnx_places(g, self.segment)
        places = g.const(np.arange(self.segment))
        put = g.op("Mul", [g.cast(g.op("Equal", [place, places]), np.float32), real])  # [B, S, N]
        hidden = g.op("Mul", [g.cast(g.op("Greater", [places, place]), np.float32), number(-1e30)])
        rows += [row(put, 2, 4), row(hidden, 2, 3), row(begins, 2, 3), row(real, 2, 3)]
        unit = number(np.ones((1, self.options.num_heads, 1, 1)))
        gate = number(self.beta.detach().sigmoid()[:, None, None].numpy())

        def step(keys: Value, values: Value, memory: Value, pending: Value, *token: Value) -> tuple[Value, ...]:
            query, key, value, read_query, read_key, put, hidden, begins, real = token
            keys = g.op("Add", [keys, g.op("Mul", [put, g.op("Sub", [key, keys])])])
            values = g.op("Add", [values, g.op("Mul", [put, g.op("Sub", [value, values])])])
            logits = g.op("Add", [g.op("MatMul", [query, transposed(keys)]), hidden])
            local = g.op("MatMul", [g.op("Softmax", [logits], axis=-1), values])
            added = g.op("Mul", [begins, pending])
            memory, pending = g.op("Add", [memory, added]), g.op("Sub", [pending, added])
            read = quotient(g.op("MatMul", [read_query, memory]))
            error = g.op("Sub", [value, quotient(g.op("MatMul", [read_key, memory]))])
            column = g.op("Mul", [real, transposed(read_key)])
            ones = g.op("Expand", [unit, g.op("Concat", [g.op("Shape", [value], end=3), g.const([1])], axis=0)])
            update = g.op("Mul", [column, g.op("Concat", [error, ones], axis=-1)])
            out = g.op("Add", [local, g.op("Mul", [gate, g.op("Sub", [read, local])])])
            return keys, values, memory, g.op("Add", [pending, update]), out

        *states, out = g.scan(step, [past[name] for name in STATES], rows)
        out = g.op("Reshape", [out, g.const([0, 0, -1])])
        return g.cast(out, g.dtype), dict(zip(STATES, states, strict=True))


def _quotient(read: Tensor) -> Tensor:
    """s(q) M / s(q) z of s(q) [M, z]."""
    return read[..., :-1] / read[..., -1:].clamp(min=SMALLEST)
