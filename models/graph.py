"""The protocol of a decoder's ONNX graph under construction, for the `onnx` methods of mixers, MLPs and number formats.

export/decoder_graph.py implements it. A weight is written when it is passed to the graph; names of nodes and weights
begin with the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import nn

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..ops.diff_attention import Signature

Value: TypeAlias = "ir.Value"
Cache = dict[str, Value]  # a layer's cache, by the names of its buffers

GROUP_QUERY_MULTIPLE = 8  # ONNX Runtime's GroupQueryAttention takes heads whose width is a multiple of this

Change: TypeAlias = "tuple[Any, Sequence[Value]]"  # in place of the module ops/diff_attention_body.py; further inputs
Attribute = int | float | str | Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class Heads:
    """Sizes of attention (ops/diff_attention.py). sliding_window: tokens that a token sees, with itself; 0: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    noise_ratio: int = 1
    wide_value: int = 0
    norm_eps: float = 0.0
    rope: bool = True
    local_rope: bool = False
    sliding_window: int = 0


class Builder(Protocol):
    """The part that number formats use."""

    dtype: type[np.floating]  # of weights and activations

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], *, domain: str = "", **attributes: Attribute
    ) -> ir.Value:
        """Add a node with one output; None omits an input."""

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        *,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""

    def scan(
        self, step: Callable[..., Sequence[ir.Value]], states: Sequence[ir.Value], rows: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """Add a loop over axis 1 of `rows`: step(*states, *row) returns the next states, then outputs. Returns the last
        states, then each output of all steps, stacked on axis 1.

        All are float32. The nodes that `step` adds may also use values from outside, but not the other way round; what
        the graph makes on first use, such as `real_tokens`, must be used before.
        """

    def custom(self, op: ModuleType, inputs: Sequence[ir.Value | None], **attributes: Attribute) -> ir.Value:
        """Add a node with one output of one of diffbit's own ops (a module of ops/), and its body."""

    def customs(
        self,
        op: ModuleType,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        body: Callable[[str], ir.Function],
        variant: Hashable = None,
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a node of one of diffbit's own ops with several outputs, and the body that its nodes with equal
        `variant` share."""

    def const(self, values: ArrayLike, dtype: DTypeLike = np.int64) -> ir.Value:
        """Add a small constant, such as a shape or axes."""

    def initializer(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Add a weight in the dtype of `array`."""

    def weight(self, name: str, array: NDArray[np.floating], dtype: type[np.floating] | None = None) -> ir.Value:
        """Add a float weight, in the graph's dtype or in `dtype`."""

    def cast(self, x: ir.Value, dtype: DTypeLike) -> ir.Value: ...


class Graph(Builder, Protocol):
    """The whole of it."""

    carried: dict[int, Cache]  # {layer: values that it passes to later layers}; for attention, its buffers

    # Shared by all layers of a call; B sequences of S new tokens, T tokens with the past
    @property
    def attention_mask(self) -> ir.Value:
        """int64 [B, T], 0: padding."""

    @property
    def real_tokens(self) -> ir.Value:
        """bool [B, S]: the new tokens that are not padding."""

    @property
    def past_length(self) -> ir.Value:
        """int64 [1]: T - S."""

    def rotated(self, x: ir.Value) -> ir.Value:
        """Add RoPE of heads x, float32 [B, S, heads, d], of the model's `rope_width`."""

    def linear(self, x: ir.Value, module: nn.Module, name: str, scale: float = 1.0, bias: bool = True) -> ir.Value:
        """Add scale * (x W^T) + bias of a linear layer, float or quantized; bias=False omits the bias."""

    def linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> Sequence[ir.Value]:
        """Add several linear layers {name: module} with the same input x, in as few products as their formats allow."""

    def stacked_linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> ir.Value | None:
        """Add them as one product whose rows have the outputs one after another; None if their formats differ."""

    def norm(self, x: ir.Value, module: nn.Module, name: str, dtype: type[np.floating] | None = None) -> ir.Value:
        """Add a norm of x, which has the graph's dtype or `dtype`; returns x if the module is an nn.Identity."""

    def residual(self, norm: nn.Module, name: str) -> ir.Value:
        """Return the residual stream through a norm, or itself if the module is an nn.Identity."""

    def add_residual(self, x: ir.Value) -> None:
        """Add x to the residual stream."""

    def set_residual(self, x: ir.Value) -> None:
        """Replace the residual stream by x."""

    def scope(self, name: str | None) -> AbstractContextManager[None]:
        """Context manager: names inside begin with this one."""

    @property
    def low_bit(self) -> bool:
        """Whether the scheme has low-bit attention, which only DiffAttention computes."""

    def attention(
        self,
        query: ir.Value,
        key: ir.Value | None,
        value: ir.Value | None,
        lambda_: ir.Value | None,
        past: Cache,
        heads: Heads,
        change: Change | None = None,
        gates: ir.Value | None = None,
    ) -> tuple[ir.Value, Cache]:
        """Add attention of heads that are not yet rotated; returns its output and the cache with the new tokens.

        With a lambda: diffbit.DiffAttention, whose inputs ops/diff_attention.py describes. Without one: softmax
        attention of query [B, S, num_heads * d], key and value [B, S, num_kv_heads * d] -> [B, S, num_heads * d], a
        DiffAttention of one branch. Without key and value, `past` is another layer's present, which is only read:
        query [B, Q, ...] is for the last Q of all tokens, and no cache is returned. gates: float32 [B, S, num_heads],
        which multiply the heads' outputs; kernels do not compute a head whose gate is 0.
        """

    def attention_inputs(self, past: Cache, heads: Heads, branches: int) -> tuple[Signature, dict[str, int], Cache]:
        """Return what a mixer needs for an attention of its own over the scheme's cache (ops/cache_body.py): a
        signature, the attributes window and first, and the inputs past_length, position_ids, cos, sin,
        attention_mask, past_*."""
