"""What the `onnx` methods of mixers and MLPs are given: a decoder's ONNX graph under construction.

export/decoder.py has the graph itself; models/ knows it by this protocol only. A weight is written where it is handed
over; names of nodes and weights begin with the layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import nn

if TYPE_CHECKING:
    import onnx_ir as ir

Cache = dict[str, "ir.Value"]  # what a layer keeps, by the names of its buffers

GROUP_QUERY_MULTIPLE = 8  # ONNX Runtime's GroupQueryAttention takes heads whose width is a multiple of this

Attribute = int | float | str | Sequence[int] | Sequence[float]


class Graph(Protocol):
    dtype: type[np.floating]  # of weights and activations
    carried: dict[int, Cache]  # what earlier layers hand on, by their indices: of attention, its buffers

    # What all layers of a call share; B sequences of S new tokens, T with those before
    @property
    def attention_mask(self) -> ir.Value:
        """int64 [B, T], 0: padding."""

    @property
    def real_tokens(self) -> ir.Value:
        """bool [B, S]: the new tokens that are no padding."""

    @property
    def past_length(self) -> ir.Value:
        """int64 [1]: T - S."""

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], *, domain: str = "", **attributes: Attribute
    ) -> ir.Value:
        """A node with one output; None is an input left out."""

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        *,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """A node with several outputs."""

    def customs(
        self,
        op: ModuleType,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        body: Callable[[str], ir.Function],
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """A node of one of diffbit's own ops (a module of ops/), and the body that all of its nodes share."""

    def const(self, values: ArrayLike, dtype: DTypeLike = np.int64) -> ir.Value:
        """A small constant, such as a shape or the axes of a node."""

    def weight(self, name: str, array: NDArray[np.floating], dtype: type[np.floating] | None = None) -> ir.Value:
        """A float weight, in the graph's dtype or in `dtype`."""

    def cast(self, x: ir.Value, dtype: DTypeLike) -> ir.Value: ...

    def linear(self, x: ir.Value, module: nn.Module, name: str, scale: float = 1.0, bias: bool = True) -> ir.Value:
        """scale * (x W^T) + bias of a linear layer, float or quantized; bias=False: without it."""

    def linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> Sequence[ir.Value]:
        """The same of several layers {name: module} that read the same x, in as few products as their formats allow."""

    def norm(self, x: ir.Value, module: nn.Module, name: str, dtype: type[np.floating] | None = None) -> ir.Value:
        """x, of the graph's dtype or of `dtype`, through a norm; unchanged where the module is an nn.Identity."""

    @property
    def low_bit(self) -> bool:
        """Whether the scheme has attention in low bits, which DiffAttention alone computes."""

    def attention(
        self,
        query: ir.Value,
        key: ir.Value | None,
        value: ir.Value | None,
        lambda_: ir.Value | None,
        past: Cache,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        noise_ratio: int = 1,
        wide_value: int = 0,
        norm_eps: float = 0.0,
        rope: bool = True,
        sliding_window: int = 0,
    ) -> tuple[ir.Value, Cache]:
        """Attention of heads that are not yet rotated, and the cache with the new tokens.

        With a lambda: diffbit.DiffAttention, and ops/diff_attention.py says what its inputs are. Without one: softmax
        attention of query [B, S, num_heads * d], key and value [B, S, num_kv_heads * d] -> [B, S, num_heads * d], a
        DiffAttention of one branch. Without key and value, past are another layer's presents, which stay as they are:
        query [B, Q, ...] are the last Q of all tokens, and there is no cache. sliding_window: tokens that a token sees,
        itself among them; 0: all.
        """
