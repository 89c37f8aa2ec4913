"""TTT-Linear (arXiv 2407.04620): the state is a linear model, which takes a step of gradient descent on each token.

    f(x; W, b) = x + LN(x W + b),   LN with a weight and a bias per head                        (section 2.7)
    l(W, b; t) = |f(k_t; W, b) - v_t|^2 / 2                                                      (eq. 4)
    W_t        = W - c_i sum_s eta_s dl/dW(W, b; s)     over the tokens s of this mini-batch of N up to t (eq. 6, 7)
    y_t        = f(q_t; W_t, b_t)                                                                (eq. 5)
    eta_s      = sigmoid(w x_s + w_0) / d               a learned rate per head                  (section 2.7)

where W and b are those that the previous mini-batch ended with, in the first one learned initial values, t is token i
of its mini-batch, and c_i = max(1 / (i + 1) + u_i, 0) with learned u_i. As in the authors' code, queries and keys are
rotated (RoPE, theta 10000) by their place in the mini-batch, and the heads together have a LayerNorm. Below, W is
[W; b], for inputs with a 1 behind them.

Low bits: those of the weights; `rate_proj` stays float. The state, 2 d (d + 1) numbers per head, is the change of W
since the first token, and the sum of eta_s dl/dW in this mini-batch; int8 states (quantize/device_cache.py) round both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from ....io.fields import Count
from ....models.layers import LayerNorm
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

EPS = 1e-6  # of both norms
STATES = "change", "pending"


@dataclass(frozen=True)
class Options(SegmentOptions):
    mini_batch: Count = field(default=16, kw_only=True)  # N

    def module(self, place: Place) -> TTT:
        return TTT(self, place)

    @property
    def float_linears(self) -> tuple[str, ...]:
        return ("rate_proj",)

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        shape = self.num_heads, self.head_dim + 1, self.head_dim
        return tuple(Buffer(name, "float32", shape) for name in STATES)

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Count two products with W and two updates of it; norms and their gradient are `other`."""
        width = self.num_heads * self.head_dim
        return Operations(matrix=4 * width * (self.head_dim + 1), other=40 * width)


class TTT(Mixer):
    def __init__(self, options: Options, place: Place) -> None:
        heads, d = options.num_heads, options.head_dim
        super().__init__(place, heads * d, q_proj=heads * d, k_proj=heads * d, v_proj=heads * d)
        self.options = options
        self.rate_proj: nn.Module = nn.Linear(place.hidden_size, heads)
        self.initial = nn.Parameter(torch.cat((0.02 * torch.randn(heads, d, d), torch.zeros(heads, 1, d)), 1))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(heads, 1, d)), nn.Parameter(torch.zeros(heads, 1, d))
        self.token_rate = nn.Parameter(torch.zeros(options.mini_batch))  # u
        self.post_norm = LayerNorm(heads * d, EPS)

    def token_rates(self) -> Tensor:
        """c, fp32 [N]."""
        counts = torch.arange(1.0, len(self.token_rate) + 1, device=self.token_rate.device)
        return (1 / counts + self.token_rate).clamp(min=0)

    def angles(self) -> Tensor:
        """Angles of RoPE, fp32 [N, d / 2]."""
        d = self.options.head_dim
        return torch.arange(self.options.mini_batch)[:, None] * 10000 ** (-torch.arange(0, d, 2) / d)

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """Return dl/dz of l = |LN(z) - target|^2 / 2."""
        spread = (z.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
        normed = (z - z.mean(-1, keepdim=True)) / spread
        error = (self.norm_weight * normed + self.norm_bias - target) * self.norm_weight
        return (error - error.mean(-1, keepdim=True) - normed * (error * normed).mean(-1, keepdim=True)) / spread

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        fixed = self.options.state(len(x), 0, x.dtype, x.device) if state is None else state
        assert isinstance(fixed, SegmentState)
        change, pending = fixed.tensors
        real, segment, place, count = segments(x, mask, fixed.count, self.options.mini_batch)
        angles = self.angles().to(x.device)[place]
        names, table = ("q_proj", "k_proj", "v_proj"), (angles.cos(), angles.sin())
        query, key, value = (
            self.get_submodule(name)(x).float().unflatten(-1, (self.options.num_heads, -1)) for name in names
        )
        query, key, value = (
            heads.transpose(1, 2) for heads in (apply_rope(query, table), apply_rope(key, table), value)
        )  # [B, H, S, d]
        rate = self.rate_proj(x).float().sigmoid().mT[..., None] / self.options.head_dim  # [B, H, S, 1]
        rates = self.token_rates()
        now = rates[place][:, None, :, None]
        unit = torch.ones_like(rate)
        asked, shown = torch.cat((query, unit), -1), torch.cat((key, unit), -1)  # [B, H, S, d + 1]

        z, gradients = torch.zeros_like(query), torch.zeros_like(query)
        for index in range(count):
            inside = (real & (segment == index)).float()[:, None, :, None]
            begins = inside.amax(2, keepdim=True) if index else torch.zeros_like(inside[:, :, :1])
            change, pending = change - rates[-1] * begins * pending, pending * (1 - begins)
            weight = self.initial + change
            z = z + inside * (asked @ weight - now * (asked @ pending))  # pending: of tokens of earlier calls
            gradient = inside * self.gradient(shown @ weight, value - key)
            gradients = gradients + gradient
            pending = pending + (rate * shown).mT @ gradient
        seen = (segment[:, None, :, None] == segment[:, None, None]).tril()
        z = z - now * ((asked @ shown.mT * seen * rate.mT) @ gradients)
        if state is not None:
            fixed.keep(real, change, pending)
        spread = (z.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
        out = query + self.norm_weight * (z - z.mean(-1, keepdim=True)) / spread + self.norm_bias
        return self.post_norm(out.to(x.dtype).transpose(1, 2).flatten(2))

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        """Add a loop over tokens, in which a head's numbers of a token are [B, H, 1, d]."""

        def number(value: ArrayLike) -> Value:
            return g.const(value, np.float32)

        def weight(name: str, value: Tensor) -> Value:
            return g.weight(f"{name}.weight", value.detach().numpy(), np.float32)

        def mean(value: Value) -> Value:
            return g.op("ReduceMean", [value, g.const([-1])])

        def normed(z: Value) -> tuple[Value, Value]:
            centred = g.op("Sub", [z, mean(z)])
            spread = g.op("Sqrt", [g.op("Add", [mean(g.op("Mul", [centred, centred])), number(EPS)])])
            return g.op("Div", [centred, spread]), spread

        def scaled(normed: Value) -> Value:
            return g.op("Add", [g.op("Mul", [normed, norm_weight]), norm_bias])

        def split(name: str) -> Value:
            rows = g.cast(parts[name], np.float32)
            return g.op("Reshape", [rows, g.const([0, 0, self.options.num_heads, 1, -1])])

        def rotated(heads: Value) -> Value:
            low, high = g.ops("Split", [heads], 2, axis=-1, num_outputs=2)
            low, high = (
                g.op(sign, [g.op("Mul", [a, cos]), g.op("Mul", [b, sin])])
                for sign, a, b in (("Sub", low, high), ("Add", high, low))
            )
            return g.op("Concat", [low, high], axis=-1)

        names = ("q_proj", "k_proj", "v_proj", "rate_proj")
        linears = g.linears(x, {name: self.get_submodule(name) for name in names[:3]})
        parts = dict(zip(names, [*linears, g.linear(x, self.rate_proj, "rate_proj")], strict=True))
        place, real, begins = onnx_places(g, self.options.mini_batch)
        angles, rates = self.angles(), self.token_rates().detach().numpy()
        place = g.op("Unsqueeze", [place, g.const([3])])
        tables = angles.cos(), angles.sin()
        cos, sin = (g.op("Gather", [number(table.numpy()), place]) for table in tables)  # [B, S, 1, 1, d / 2]
        now = g.op("Unsqueeze", [g.op("Gather", [number(rates), place]), g.const([4])])  # [B, S, 1, 1, 1]
        query, key, value = rotated(split("q_proj")), rotated(split("k_proj")), split("v_proj")  # [B, S, H, 1, d]
        real, begins = (g.op("Unsqueeze", [flag, g.const([2, 3])]) for flag in (real, begins))
        rate = g.op("Mul", [g.op("Sigmoid", [split("rate_proj")]), number(1 / self.options.head_dim)])
        rate = g.op("Mul", [rate, real])
        unit = g.op("Add", [g.op("Mul", [rate, number(0)]), number(1)])
        asked, shown = (g.op("Concat", [heads, unit], axis=-1) for heads in (query, key))
        norm_weight, norm_bias = weight("norm", self.norm_weight), weight("shift", self.norm_bias)
        initial = weight("initial", self.initial)

        def step(change: Value, pending: Value, *token: Value) -> tuple[Value, ...]:
            asked, shown, target, rate, now, begins = token
            ended = g.op("Mul", [begins, pending])
            change = g.op("Sub", [change, g.op("Mul", [ended, number(rates[-1])])])
            weight = g.op("Add", [initial, change])
            normalized, spread = normed(g.op("MatMul", [shown, weight]))
            error = g.op("Mul", [g.op("Sub", [scaled(normalized), target]), norm_weight])
            along = g.op("Mul", [normalized, mean(g.op("Mul", [error, normalized]))])
            gradient = g.op("Div", [g.op("Sub", [g.op("Sub", [error, mean(error)]), along]), spread])
            column = g.op("Transpose", [g.op("Mul", [shown, rate])], perm=[0, 1, 3, 2])
            pending = g.op("Add", [g.op("Sub", [pending, ended]), g.op("Mul", [column, gradient])])
            weight = g.op("Sub", [weight, g.op("Mul", [now, pending])])
            return change, pending, g.op("MatMul", [asked, weight])

        rows = [asked, shown, g.op("Sub", [value, key]), rate, now, begins]
        *states, z = g.scan(step, [past[name] for name in STATES], rows)
        out = g.op("Add", [query, scaled(normed(z)[0])])
        out = g.cast(g.op("Reshape", [out, g.const([0, 0, -1])]), g.dtype)
        return g.norm(out, self.post_norm, "post_norm"), dict(zip(STATES, states, strict=True))
