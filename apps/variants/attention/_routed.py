"""A mixture of heads (MoH, arXiv 2410.11842, section 3), for each attention variant of the core.

    o_i = g_i head_i(x)          g_i depends on the token x; H heads, S of which are shared and always on

    g_i = 2 a_1 S softmax(W_s x)_i         for the shared heads, the first S
    g_i = 2 a_2 K softmax_K(W_r x)_i       for the others; softmax_K is over the K largest, the rest is off: g_i = 0
    a = softmax(W_h x)

The factors 2, S and K are those of the authors' code (github.com/SkyworkAI/MoH, MoH-ViT/attention.py), as is softmax_K:
in eq. 5 of the paper softmax is over all of W_r x. Where all logits are equal, g_i of a head that is on is 1. W_s, W_r
and W_h are the rows of router_proj, which stays float32 unless an override names it. Of equal logits at the K-th place
all are on. With K = 1, only the balance loss trains W_r.

A class that inherits from Routed and from a variant gates the variant's heads; a head of differential attention is the
difference, after its norm. DiffAttention's kernels do not compute a head that is off (ops/diff_attention.py, "Gates");
torch and the portable body compute every head. The keys and values of all heads are computed, because later tokens may
read them. Methods may change all that they may change in the variant, because g_i is one number for a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from ....io.errors import DiffbitError
from ....io.fields import Count
from ....models.attention import Attention, AttentionOptions
from ....models.mixers import Carried, Graph, Operations, Place, Rope, State, Value

HIDDEN = -1e30
ROUTER = "router_proj"


@dataclass(frozen=True)
class RoutedOptions(AttentionOptions):
    """shared_heads: S. top_k: K, of the other heads."""

    shared_heads: Count = field(kw_only=True)
    top_k: Count = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_heads + self.top_k > self.num_heads:
            raise DiffbitError(
                f"shared_heads is {self.shared_heads} and top_k {self.top_k}, together more than the {self.num_heads} "
                "heads; lower one of them"
            )

    @classmethod
    def equal_sizes(cls, pairs: int, head_dim: int) -> dict[str, int]:
        """Three quarters of the heads are on, with at least two routed ones where there are four heads or more."""
        heads, _ = cls.equal_heads(pairs)
        return {"shared_heads": max(1, heads // 4), "top_k": max(1, heads // 2)}

    @property
    def float_linears(self) -> tuple[str, ...]:
        return (*super().float_linears, ROUTER)

    def operations(self, context: int, low_bit: bool) -> Operations:
        plain = super().operations(context, low_bit)
        return replace(plain, other=plain.other + self.width + 2 * self.num_heads)


class Routed(Attention):
    def __init__(self, options: RoutedOptions, place: Place) -> None:
        super().__init__(options, place)
        self.shared_heads, self.top_k = options.shared_heads, options.top_k
        self.sizes = [options.shared_heads, options.num_heads - options.shared_heads, 2]  # of W_s, W_r and W_h
        self.router_proj = nn.Linear(place.hidden_size, sum(self.sizes), bias=False)

    def gates(self, x: Tensor) -> Tensor:
        """Return g, fp32 [B, S, H]. In training, sets the auxiliary loss."""
        shared, routed, kinds = self.router_proj(x).float().split(self.sizes, -1)
        off = routed < routed.topk(self.top_k).values.amin(-1, keepdim=True)
        if self.training and torch.is_grad_enabled():
            self.auxiliary_loss = balance_loss(routed, ~off)
        parts = shared.softmax(-1), routed.masked_fill(off, HIDDEN).softmax(-1)
        weights = (2 * kinds.softmax(-1)).split(1, -1)
        counts = self.shared_heads, self.top_k
        return torch.cat([n * a * part for n, a, part in zip(counts, weights, parts, strict=True)], -1)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        heads = super().heads(x, rope, mask, state, carried).unflatten(-1, (self.num_heads, -1))
        return (heads * self.gates(x)[..., None].to(heads.dtype)).flatten(2)

    def onnx_gates(self, g: Graph, x: Value) -> Value:
        """Add `gates` as ONNX nodes."""
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


def balance_loss(logits: Tensor, on: Tensor) -> Tensor:
    """Return n sum_i P_i f_i of n routed heads, which is K where they are balanced: P_i is the mean of softmax(W_r x)_i
    over all tokens, f_i the share of the tokens whose head i is on (eq. 7; the factor n is the authors' code's)."""
    probabilities, shares = (part.flatten(0, -2).mean(0) for part in (logits.softmax(-1), on.float()))
    return logits.shape[-1] * (probabilities * shares).sum()
