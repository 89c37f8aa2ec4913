"""A mixture of heads (MoH, arXiv 2410.11842, section 3), for each attention variant of the core.

    o_i = g_i head_i(x)          g_i depends on the token x; H heads, S of which are shared and always on

    g_i = 2 a_1 S softmax(W_s x)_i         for the shared heads, the first S
    g_i = 2 a_2 K softmax_K(W_r x)_i       for the others; softmax_K is over the K largest, the rest is off: g_i = 0
    a = softmax(W_h x)

The factors 2, S and K are those of the authors' code (github.com/SkyworkAI/MoH, MoH-ViT/attention.py), as is softmax_K:
in eq. 5 of the paper softmax is over all of W_r x. Where all logits are equal, g_i of a head that is on is 1. W_s, W_r
and W_h are the rows of router_proj, which stays float32 unless an override names it. Of equal logits at the K-th place
all are on. With K = 1, only the balance loss trains W_r.

With router "norm" there are no weights to learn first, so a pretrained model can begin with it (section 4.4 of the
paper, and the authors' MoH-LLaMA3/Inference_code/modeling_llama.py):

    g_i = 1        for the shared heads, and for the K others with the largest ||q_i||; 0 for the rest
    p   = softmax(||q|| / std(||q||))      over the others

q_i is the head's query as q_proj makes it, before any norm of queries, which would make all alike; of differential
attention the signal query. The gradient of g_i goes to p_i (straight through), and the balance loss is that of p. No
gradient goes through std.

A class that inherits from Routed and from a variant gates the variant's heads; a head of differential attention is the
difference, after its norm. DiffAttention's kernels do not compute a head that is off (ops/diff_attention.py, "Gates");
torch and the portable body compute every head. The keys and values of all heads are computed, because later tokens may
read them. Methods may change all that they may change in the variant, because g_i is one number for a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from ....io.errors import DiffbitError
from ....io.fields import OMITTED, Count, one_of
from ....models.attention import Attention, AttentionOptions, Projected
from ....models.mixers import Carried, Graph, Operations, Place, Rope, State, Value

HIDDEN = -1e30
TINY = 1e-12  # of a norm, and of a deviation: no division by 0
ROUTER = "router_proj"


@dataclass(frozen=True)
class RoutedOptions(AttentionOptions):
    """shared_heads: S. top_k: K, of the other heads. router: "linear", a layer with weights, or "norm", of the queries.
    shared: which heads are the S shared ones, with router "norm"; None: the first."""

    shared_heads: Count = field(kw_only=True)
    top_k: Count = field(kw_only=True)
    router: Annotated[str, one_of("linear", "norm")] = field(default="linear", kw_only=True, metadata=OMITTED)
    shared: tuple[int, ...] | None = field(default=None, kw_only=True, metadata=OMITTED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_heads + self.top_k > self.num_heads:
            raise DiffbitError(
                f"shared_heads is {self.shared_heads} and top_k {self.top_k}, together more than the {self.num_heads} "
                "heads; lower one of them"
            )
        if self.shared is None:
            return
        if self.router != "norm":
            raise DiffbitError("shared is set, but router is linear, whose shared heads are always the first")
        if len({*self.shared} & {*range(self.num_heads)}) != self.shared_heads or len(self.shared) != self.shared_heads:
            raise DiffbitError(
                f"shared is {list(self.shared)}, wanted {self.shared_heads} different heads below {self.num_heads}, as "
                "many as shared_heads says"
            )
        if sorted(self.shared) != list(self.shared):
            raise DiffbitError(f"shared is {list(self.shared)}, wanted the heads in rising order")

    @classmethod
    def equal_sizes(cls, pairs: int, head_dim: int) -> dict[str, int]:
        """Three quarters of the heads are on, with at least two routed ones where there are four heads or more."""
        heads, _ = cls.equal_heads(pairs)
        return {"shared_heads": max(1, heads // 4), "top_k": max(1, heads // 2)}

    @property
    def float_linears(self) -> tuple[str, ...]:
        return (*super().float_linears, *([ROUTER] if self.router == "linear" else []))

    def operations(self, context: int, low_bit: bool) -> Operations:
        plain = super().operations(context, low_bit)
        scores = self.num_heads * self.head_dim if self.router == "norm" else 0
        return replace(plain, other=plain.other + self.width + 2 * self.num_heads + scores)


class Routed(Attention):
    def __init__(self, options: RoutedOptions, place: Place) -> None:
        super().__init__(options, place)
        self.shared_heads, self.top_k, self.router = options.shared_heads, options.top_k, options.router
        self.sizes = [options.shared_heads, options.num_heads - options.shared_heads, 2]  # of W_s, W_r and W_h
        shared = range(options.shared_heads) if options.shared is None else options.shared
        self.shared = [head in shared for head in range(options.num_heads)]
        # Rows of q_proj: groups of signal heads, with the noise head that they share
        self.signals, groups = options.noise_ratio, options.num_heads // options.noise_ratio
        self.groups = [groups, options.softmaxes // groups, options.head_dim]
        self.last_rows: Tensor | None = None  # what q_proj returned in this call
        self.last_onnx_rows: tuple[Value, Projected] | None = None  # its input, and what was made of it
        if self.router == "linear":
            self.router_proj = nn.Linear(place.hidden_size, sum(self.sizes), bias=False)

    def query_rows(self, x: Tensor) -> Tensor:
        self.last_rows = super().query_rows(x)
        return self.last_rows

    def gates(self, x: Tensor) -> Tensor:
        """Return g, fp32 [B, S, H]. In training, sets the auxiliary loss."""
        rows, self.last_rows = self.last_rows, None
        if self.router == "norm":
            return self._gates_of_norms(super().query_rows(x) if rows is None else rows)
        shared, routed, kinds = self.router_proj(x).float().split(self.sizes, -1)
        off = routed < routed.topk(self.top_k).values.amin(-1, keepdim=True)
        if self.training and torch.is_grad_enabled():
            self.auxiliary_loss = balance_loss(routed, ~off)
        parts = shared.softmax(-1), routed.masked_fill(off, HIDDEN).softmax(-1)
        weights = (2 * kinds.softmax(-1)).split(1, -1)
        counts = self.shared_heads, self.top_k
        return torch.cat([n * a * part for n, a, part in zip(counts, weights, parts, strict=True)], -1)

    def _gates_of_norms(self, rows: Tensor) -> Tensor:
        signals = rows.float().unflatten(-1, self.groups)[..., : self.signals, :].flatten(-3, -2)  # [B, S, H, d]
        squares = signals.square().sum(-1)
        shared = torch.tensor(self.shared, device=rows.device)
        scores = squares + torch.where(shared, -HIDDEN, 0.0)
        on = scores >= scores.topk(self.shared_heads + self.top_k).values.amin(-1, keepdim=True)
        if not (self.training and torch.is_grad_enabled()):
            return on.float()
        norms = squares[..., ~shared].clamp(min=TINY).sqrt()
        deviation = norms.detach().std(-1, keepdim=True, correction=int(norms.shape[-1] > 1))
        logits = norms / deviation.clamp(min=TINY)
        self.auxiliary_loss = balance_loss(logits, on[..., ~shared])
        shares = torch.zeros_like(squares).masked_scatter(~shared, logits.softmax(-1))
        return on + (shares - shares.detach())

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        heads = super().heads(x, rope, mask, state, carried).unflatten(-1, (self.num_heads, -1))
        return (heads * self.gates(x)[..., None].to(heads.dtype)).flatten(2)

    def onnx_rows(self, g: Graph, x: Value) -> Projected:
        if self.last_onnx_rows is None or self.last_onnx_rows[0] is not x:
            self.last_onnx_rows = x, super().onnx_rows(g, x)
        return self.last_onnx_rows[1]

    def onnx_gates(self, g: Graph, x: Value) -> Value:
        """Add `gates` as ONNX nodes."""
        if self.router == "norm":
            return self._onnx_gates_of_norms(g, self.onnx_rows(g, x)[0])
        logits = g.cast(g.linear(x, self.router_proj, ROUTER), np.float32)
        shared, routed, kinds = g.ops("Split", [logits, g.const(self.sizes)], 3, axis=-1)
        largest, _ = g.ops("TopK", [routed, g.const([self.top_k])], 2, axis=-1)
        last = g.op("Slice", [largest, g.const([self.top_k - 1]), g.const([self.top_k]), g.const([-1])])
        off = g.op("Less", [routed, last])
        routed = g.op("Where", [off, g.const(HIDDEN, np.float32), routed])
        counts = g.const([2 * self.shared_heads, 2 * self.top_k], np.float32)
        weights = g.op("Mul", [g.op("Softmax", [kinds], axis=-1), counts])
        parts = zip(g.ops("Split", [weights], 2, axis=-1, num_outputs=2), (shared, routed), strict=True)
        return g.op("Concat", [g.op("Mul", [a, g.op("Softmax", [part], axis=-1)]) for a, part in parts], axis=-1)

    def _onnx_gates_of_norms(self, g: Graph, rows: Value) -> Value:
        signals = g.op("Reshape", [rows, g.const([0, 0, *self.groups])])  # [B, S, H/R, R or R+1, d]
        if self.groups[1] > self.signals:
            signals = g.op("Slice", [signals, g.const([0]), g.const([self.signals]), g.const([3])])
        signals = g.cast(signals, np.float32)
        squares = g.op("ReduceSum", [g.op("Mul", [signals, signals]), g.const([-1])])
        squares = g.op("Reshape", [squares, g.const([0, 0, self.num_heads])])
        scores = g.op("Add", [squares, g.const([-HIDDEN * shared for shared in self.shared], np.float32)])
        count = self.shared_heads + self.top_k
        largest, _ = g.ops("TopK", [scores, g.const([count])], 2, axis=-1)
        last = g.op("Slice", [largest, g.const([count - 1]), g.const([count]), g.const([-1])])
        off, on = (g.const(gate, np.float32) for gate in (0, 1))
        return g.op("Where", [g.op("Less", [scores, last]), off, on])


def balance_loss(logits: Tensor, on: Tensor) -> Tensor:
    """Return n sum_i P_i f_i of n routed heads, which is K where they are balanced: P_i is the mean of softmax(W_r x)_i
    over all tokens, f_i the share of the tokens whose head i is on (eq. 7; the factor n is the authors' code's)."""
    probabilities, shares = (part.flatten(0, -2).mean(0) for part in (logits.softmax(-1), on.float()))
    return logits.shape[-1] * (probabilities * shares).sum()
