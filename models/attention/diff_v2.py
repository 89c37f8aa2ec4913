"""Differential attention, version 2 (hf.co/blog/microsoft/diff-attn-v2; unilm, Diff-Transformer-V2).

    a_j = softmax(q_j k_g^T / sqrt d) v_g    for 2H query sub-heads, both of a pair on kv head g = i // (H/KV)
    o_i = a_2i - sigmoid(lambda_i(x)) * a_2i+1,     lambda(x) = W x: one number per token and head

No head norm and no lambda_init. It is grouped-query attention with twice the query heads and a subtraction after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..graph import GROUP_QUERY_MULTIPLE, Graph
from ..layers.rope import Rope, apply_rope
from ..layers.softmax import attend, explicit_pairs, in_one_kernel
from ..layers.state import State
from ..mixer import Attention, AttentionOptions, Operations, Place, Symmetries, appended
from .softmax import group_query_in_place

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..graph import Cache


@dataclass(frozen=True)
class Options(AttentionOptions):
    def module(self, place: Place) -> DiffV2:
        return DiffV2(self, place)

    def symmetries(self) -> Symmetries:
        """Both heads of a pair share a value and no norm follows: what mixes its channels passes through."""
        shared = self.num_heads // self.num_kv_heads
        key_of = tuple(head // shared for head in range(self.num_heads) for _ in range(2))
        return Symmetries(value_width=self.head_dim, value_scales=True, key_of=key_of)

    @property
    def softmaxes(self) -> int:
        return 2 * self.num_heads

    @property
    def in_place(self) -> str:
        return group_query_in_place(self.head_dim)

    def operations(self, context: int, low_bit: bool) -> Operations:
        """The difference is of the results; in low bits of the weights, then there is one product with the values."""
        found = super().operations(context, low_bit)
        if not low_bit:
            return replace(found, other=found.other + self.num_heads * self.head_dim)
        return replace(found, matrix=found.matrix // 2, other=found.other + self.num_heads * context)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, pairs

    def joint_rows(self) -> dict[str, int]:
        return {"q_proj": 2 * self.head_dim, "k_proj": self.head_dim, "v_proj": self.head_dim}


class DiffV2(Attention):
    def __init__(self, options: Options, place: Place) -> None:
        heads, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        super().__init__(options, place, heads, q_proj=2 * heads, k_proj=keys, v_proj=keys)
        self.lambda_proj = nn.Linear(place.hidden_size, options.num_heads, bias=False)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None) -> Tensor:
        projected = self._projected(x, rope)
        if not self.explicit and in_one_kernel(projected[0], mask, state):
            from ..layers.triton_attention import diff_attention

            return diff_attention(*projected, self.lambda_of(x).squeeze(-1), self.scale).flatten(2)
        signal, noise = self._branches(*projected, mask, state)
        out = (signal - self.lambda_of(x) * noise).to(x.dtype)  # of fp32 [B, H, S, d]
        return out.transpose(1, 2).flatten(2)

    def branches(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None) -> tuple[Tensor, Tensor]:
        """a_2i and a_2i+1, fp32 [B, H, S, d]."""
        return self._branches(*self._projected(x, rope), mask, state)

    def _projected(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, 2H, d] and key [B, S, KV, d], rotated, and value [B, S, KV, d]."""
        query = apply_rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        key = apply_rope(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        return query, key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _branches(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, heads, S, d]
        key, value = appended(state, key, value)  # [B, KV, T, d]
        if self.explicit:
            return explicit_pairs(query, (key, key), value, mask, self.scale, self.arithmetic, self.logits_hook)
        out = attend(query, key, value, mask, self.scale).float()  # [B, 2H, S, d]
        return out[:, 0::2], out[:, 1::2]

    def lambda_of(self, x: Tensor) -> Tensor:
        """sigmoid(lambda(x)), fp32 [B, H, S, 1]."""
        lambda_: Tensor = self.lambda_proj(x)
        return lambda_.float().sigmoid().transpose(1, 2)[..., None]

    def onnx_heads(self, g: Graph, x: ir.Value, past: Cache) -> tuple[ir.Value, Cache]:
        query = g.linear(x, self.q_proj, "q_proj")
        key = g.linear(x, self.k_proj, "k_proj")
        value = g.linear(x, self.v_proj, "v_proj")
        weight = g.op("Sigmoid", [g.linear(x, self.lambda_proj, "lambda_proj")])  # [B, S, H]
        heads, kv_heads, width = self.num_heads, self.num_kv_heads, self.head_dim
        if g.low_bit or width % GROUP_QUERY_MULTIPLE:
            lambda_ = g.cast(weight, "float32")
            return g.diff_attention(
                query, key, value, lambda_, past, num_heads=heads, num_kv_heads=kv_heads, scale=self.scale
            )
        out, present = g.softmax_attention(
            query, key, value, past, num_heads=2 * heads, num_kv_heads=kv_heads, head_dim=width, scale=self.scale
        )
        pairs = g.op("Reshape", [out, g.const([0, 0, heads, 2 * width])])
        signal, noise = g.ops("Split", [pairs], 2, axis=-1, num_outputs=2)  # [B, S, H, d]
        noise = g.op("Mul", [noise, g.op("Unsqueeze", [weight, g.const([-1])])])
        return g.op("Reshape", [g.op("Sub", [signal, noise]), g.const([0, 0, heads * width])]), present
