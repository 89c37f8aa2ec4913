"""Multi-scale retention (RetNet, arXiv 2307.08621, eq. 5-8): a matrix of fixed size for each head, which decays.

    q_t = R_t W_q x_t,   k_t = R_t W_k x_t / sqrt d,   v_t = W_v x_t       R_t: RoPE, e^{i t theta} in the paper
    S_t = gamma_h S_{t-1} + k_t^T v_t,   o_t = q_t S_t                     recurrent form (eq. 6), S_t [d, 2d]
    y   = silu(W_g x) * RMSNorm(o),   then o_proj                          gamma_h = 1 - 2^(-5 - h) (eq. 8)

For S tokens at once after a state S_0 (parallel form, eq. 5, and with S_0 chunkwise, eq. 7), where n_t is the number of
real tokens up to t, so that padding neither decays a state nor adds to it:

    o_t = sum_{s<=t} gamma^(n_t - n_s) (q_t . k_s) v_s + gamma^(n_t) q_t S_0

Values are 2d wide, as in the authors' models, so a layer has as many weights as diff_v1's with as many heads. Decay and
rotation together are xPos (2212.10554) with one decay for a head. The norm of each head has no weight, as in the
authors' code (torchscale, which replaced GroupNorm by RMSNorm in October 2023); the scales by which it keeps numbers
small cancel out in the norm. Angles are the model's RoPE.

Low bits: those of the weights, and int8 states (quantize/device_cache.py); research/variants has what they cost trained
models. With random inputs, d = 32 and a scale per row, 1024 roundings to int8 make outputs wrong by 2.3 % (h = 0) to
9.8 % (h = 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....io.fields import Count, Rule
from ....models.layers import Carried, FixedState, Rope, State, apply_rope, real_tokens
from ....models.mixers import Buffer, Cache, Graph, KVBuffers, Mixer, MixerOptions, Operations, Place, Value

NORM_EPS = 1e-5


@dataclass(frozen=True)
class Options(MixerOptions):
    """head_dim: d, the width of queries and keys; values are twice as wide."""

    num_heads: Count
    head_dim: Annotated[int, Rule("an even {} above 0", lambda value: value > 0 and value % 2 == 0)]

    def module(self, place: Place) -> Retention:
        return Retention(self, place)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return pairs, pairs

    @property
    def rope_width(self) -> int:
        return self.head_dim

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        return (Buffer("retained", "float32", (self.num_heads, self.head_dim, 2 * self.head_dim)),)

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Count decay, update and read of each number of the state; rotations, norm and gate are `other`."""
        width = self.num_heads * self.head_dim
        return Operations(matrix=3 * 2 * width * self.head_dim, other=16 * width)


class Retention(Mixer):
    def __init__(self, options: Options, place: Place) -> None:
        self.num_heads, self.head_dim = options.num_heads, options.head_dim
        width = options.num_heads * options.head_dim
        super().__init__(place, 2 * width, q_proj=width, k_proj=width, v_proj=2 * width, g_proj=2 * width)

    def log_decay(self) -> Tensor:
        """log gamma_h, fp32 [H]."""
        return torch.log1p(-(2.0 ** (-5 - torch.arange(self.num_heads, dtype=torch.float32))))

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        def projected(name: str) -> Tensor:
            rows = self.get_submodule(name)(x).float().unflatten(-1, (self.num_heads, -1))
            return (apply_rope(rows, rope[:2]) if name != "v_proj" else rows).transpose(1, 2)

        query, key, value = (projected(name) for name in ("q_proj", "k_proj", "v_proj"))  # [B, H, S, d or 2d]
        real = real_tokens(mask, x.shape[1])
        real = x.new_ones(1, x.shape[1]) if real is None else real
        key = key * (real[:, None, :, None] * self.head_dim**-0.5)
        decay = real.float().cumsum(-1)[:, None] * self.log_decay().to(x.device)[:, None]  # [B, H, S]
        apart = (decay[..., None] - decay[..., None, :]).tril().exp().tril()  # [B, H, S, S]
        out = (query @ key.mT * apart) @ value
        if state is not None:
            assert isinstance(state, FixedState)
            (before,) = state.tensors
            out = out + decay.exp()[..., None] * (query @ before)
            left = (decay[..., -1:] - decay).exp()[..., None]  # [B, H, S, 1]
            state.tensors = (decay[..., -1, None, None].exp() * before + (key * left).mT @ value,)
        out = F.rms_norm(out, out.shape[-1:], eps=NORM_EPS).to(x.dtype).transpose(1, 2).flatten(2)
        return out * F.silu(self.get_submodule("g_proj")(x))

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        def number(value: float) -> Value:
            return g.const(value, np.float32)

        names = ("q_proj", "k_proj", "v_proj", "g_proj")
        *rows, gate = g.linears(x, {name: self.get_submodule(name) for name in names})
        by_head = g.const([0, 0, self.num_heads, -1])
        query, key, value = (g.op("Reshape", [g.cast(part, np.float32), by_head]) for part in rows)
        query = g.op("Transpose", [g.rotated(query)], perm=[0, 2, 1, 3])  # [B, H, S, d]
        key = g.op("Transpose", [g.rotated(key)], perm=[0, 2, 3, 1])  # [B, H, d, S]
        value = g.op("Transpose", [value], perm=[0, 2, 1, 3])
        real = g.op("Unsqueeze", [g.cast(g.real_tokens, np.float32), g.const([1, 2])])  # [B, 1, 1, S]
        key = g.op("Mul", [key, g.op("Mul", [real, number(self.head_dim**-0.5)])])
        across = g.op("Mul", [g.op("CumSum", [real, g.const(3)]), g.const(self.log_decay()[:, None, None], np.float32)])
        along = g.op("Transpose", [across], perm=[0, 1, 3, 2])  # [B, H, S, 1]
        apart = g.op("Trilu", [g.op("Sub", [along, across])], upper=0)
        apart = g.op("Trilu", [g.op("Exp", [apart])], upper=0)
        out = g.op("MatMul", [g.op("Mul", [g.op("MatMul", [query, key]), apart]), value])
        out = g.op("Add", [out, g.op("Mul", [g.op("Exp", [along]), g.op("MatMul", [query, past["retained"]])])])
        last = g.op("Gather", [across, g.const([-1])], axis=3)  # [B, H, 1, 1]
        left = g.op("Mul", [key, g.op("Exp", [g.op("Sub", [last, across])])])
        decayed = g.op("Mul", [g.op("Exp", [last]), past["retained"]])
        present = g.op("Add", [decayed, g.op("MatMul", [left, value])])
        power = g.op("ReduceMean", [g.op("Mul", [out, out]), g.const([3])])
        out = g.op("Div", [out, g.op("Sqrt", [g.op("Add", [power, number(NORM_EPS)])])])
        out = g.op("Reshape", [g.op("Transpose", [out], perm=[0, 2, 1, 3]), g.const([0, 0, -1])])
        gate = g.op("Mul", [gate, g.op("Sigmoid", [gate])])
        return g.op("Mul", [g.cast(out, g.dtype), gate]), {"retained": present}
