"""Softmax attention of a plain Transformer with grouped key-value heads (arXiv 1706.03762, eq. 1; 2305.13245).

o_h = softmax(q_h k_g^T / sqrt d) v_g,    g = h // (H/KV)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..graph import GROUP_QUERY_MULTIPLE, Graph
from ..layers.rope import Rope, apply_rope
from ..layers.softmax import Arithmetic, attend, explicit_softmax
from ..layers.state import State
from ..mixer import Attention, AttentionOptions, Place, Symmetries, appended

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..graph import Cache


@dataclass(frozen=True)
class Options(AttentionOptions):
    def module(self, place: Place) -> Softmax:
        return Softmax(self, place)

    def symmetries(self) -> Symmetries:
        """A head is a mean of its values: what mixes their channels passes through."""
        shared = self.num_heads // self.num_kv_heads
        key_of = tuple(head // shared for head in range(self.num_heads))
        return Symmetries(value_width=self.head_dim, value_scales=True, key_of=key_of)

    @property
    def softmaxes(self) -> int:
        return self.num_heads

    @property
    def in_place(self) -> str:
        return group_query_in_place(self.head_dim)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, 2 * pairs

    def joint_rows(self) -> dict[str, int]:
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.head_dim)


def group_query_in_place(head_dim: int) -> str:
    """GroupQueryAttention writes into a buffer bound as past and as present; DiffAttention's kernel alone does."""
    return "native" if head_dim % GROUP_QUERY_MULTIPLE else "always"


class Softmax(Attention):
    def __init__(self, options: Options, place: Place) -> None:
        queries, keys = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        super().__init__(options, place, queries, q_proj=queries, k_proj=keys, v_proj=keys)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None) -> Tensor:
        query = apply_rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rope).transpose(1, 2)  # [B, H, S, d]
        key = apply_rope(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rope).transpose(1, 2)  # [B, KV, S, d]
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key, value = appended(state, key, value)  # [B, KV, T, d]
        if self.explicit:
            arithmetic = self.arithmetic or Arithmetic()
            probabilities = explicit_softmax(arithmetic.logits(query, key, self.scale, 0), mask, self.logits_hook)
            found = arithmetic.mix(probabilities, value, self.head_dim).to(x.dtype)
        else:
            found = attend(query, key, value, mask, self.scale)
        return found.transpose(1, 2).flatten(2)

    def onnx_heads(self, g: Graph, x: ir.Value, past: Cache) -> tuple[ir.Value, Cache]:
        return g.softmax_attention(
            g.linear(x, self.q_proj, "q_proj"),
            g.linear(x, self.k_proj, "k_proj"),
            g.linear(x, self.v_proj, "v_proj"),
            past,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
        )
