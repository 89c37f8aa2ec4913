"""Softmax attention of a plain Transformer with grouped key-value heads (arXiv 1706.03762, eq. 1; 2305.13245).

o_h = softmax(q_h k_g^T / sqrt d) v_g,    g = h // (H/KV)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..graph import GROUP_QUERY_MULTIPLE, Cache, Graph, Heads, Value
from ..layers.rope import Rope
from ..layers.state import Carried, State
from ..mixers import Place, Symmetries
from ._attention import Attention, AttentionOptions


@dataclass(frozen=True)
class GroupQueryOptions(AttentionOptions):
    """Options of attention that ONNX Runtime's GroupQueryAttention can compute: each softmax has a d-wide value, and
    neighbouring ones share a key and a value."""

    def symmetries(self) -> Symmetries:
        """A head is a weighted sum of values and has no norm, so any mixing of the values' channels passes through."""
        shared = self.softmaxes // self.cache_heads
        key_of = tuple(head // shared for head in range(self.softmaxes))
        return Symmetries(value_width=self.head_dim, value_scales=True, key_of=key_of)

    @property
    def in_place(self) -> str:
        """GroupQueryAttention writes into a buffer bound as past and present; for layers that it cannot compute, only
        DiffAttention's kernel does."""
        simple = self.rope and not self.sliding_window and not self.head_dim % GROUP_QUERY_MULTIPLE
        return "always" if simple else "native"


@dataclass(frozen=True)
class Options(GroupQueryOptions):
    def module(self, place: Place) -> Softmax:
        return Softmax(self, place)

    @property
    def softmaxes(self) -> int:
        return self.num_heads

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, 2 * pairs


class Softmax(Attention):
    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        (output,) = self.branches(*self.projected(x, rope, state, carried), mask)
        return output.to(x.dtype).transpose(1, 2).flatten(2)

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        heads = Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        return self.onnx_attention(g, x, None, past, heads, gates=self.onnx_gates(g, x))
