"""CRATE's multi-head subspace self-attention, MSSA (arXiv 2311.13110): one projection for each head.

    u_h = U_h^T x,    o_h = softmax(u_h u_h^T / sqrt d) u_h

queries, keys and values in one; then o_proj in place of the U_h, as in the authors' code. q_proj has the rows of all
U_h^T. Here it is causal, and queries and keys are rotated (RoPE), so the cache has keys and values like any other, and
its formats. The other half of a CRATE layer is an MLP (../mlp/ista.py).

A layer has half as many weights as softmax attention with as many heads; `train` gives it twice the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ....io.errors import DiffbitError
from ....models import LayerCache
from ....models.attention import softmax
from ....models.mixers import Carried, Graph, Place, Rope, State, Symmetries, Value


@dataclass(frozen=True)
class Options(softmax.Options):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads != self.num_heads:
            raise DiffbitError(
                f"num_kv_heads is {self.num_kv_heads}, wanted {self.num_heads}, as many as heads: a head is its own key"
            )
        if self.keys_of is not None:
            raise DiffbitError(f"keys_of is {self.keys_of}, wanted none: a head is its own key")

    def module(self, place: Place) -> SubspaceAttention:
        return SubspaceAttention(self, place)

    def symmetries(self) -> Symmetries:
        return Symmetries()  # a change of the values would be one of queries and keys

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 4 * pairs, 4 * pairs


class SubspaceAttention(softmax.Softmax):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        del self.k_proj, self.v_proj

    def projected(self, x: Tensor, rope: Rope, state: State | None, carried: Carried) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.q_proj(x)
        query, key = (self._rotated(self._normed(rows, norm), rope) for norm in (self.q_norm, self.k_norm))
        value = rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if state is not None:
            assert isinstance(state, LayerCache)
            key, value = state.append(key, value)
        if self.gives:
            carried[self.layer_index] = key, value
        return query, key, value

    def onnx_projected(self, g: Graph, x: Value) -> tuple[Value, Value | None, Value | None]:
        rows = g.linear(x, self.q_proj, "q_proj")
        query, key = (
            self._onnx_normed(g, rows, norm, name) for norm, name in ((self.q_norm, "q_norm"), (self.k_norm, "k_norm"))
        )
        return query, key, rows
