"""Shared code of all attention variants: options, projections, cache, softmaxes, and the difference of two branches.

A variant is one file in models/attention/, which defines its heads (models/mixers/ defines mixers).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...io.errors import DiffbitError
from ...io.fields import NotNegative, bounds
from ...ops.cache import TOKENS, Buffer
from ...ops.diff_attention_reference import in_pairs
from ..graph import Cache, Change, Graph, Heads, Value
from ..layers.arithmetic import Arithmetic, LogitsHook, attend, explicit_softmax
from ..layers.masks import within
from ..layers.norm import RMSNorm
from ..layers.rope import Rope, apply_rope
from ..layers.state import Carried, FixedState, LayerCache, State
from ..mixers import KVBuffers, Mixer, MixerOptions, Operations, Place

Projected: TypeAlias = "tuple[Value, Value | None, Value | None]"  # query, key and value in a graph


@dataclass(frozen=True)
class AttentionOptions(MixerOptions):
    """Options of attention. A head of a plain Transformer has one softmax, a differential head two (a pair of query
    sub-heads), each head_dim = d wide. num_kv_heads: groups of heads that share keys and values.

    qkv_bias: whether q_proj, k_proj and v_proj have a bias; o_bias: whether o_proj has one. qk_norm_eps: of an RMSNorm
    of each query and key sub-head before RoPE, with a weight [d] that all heads share; 0: no such norm. qk_norm_whole:
    it is a norm of all queries, or all keys, of a token together, with a weight for each row. sliding_window: tokens
    that a token sees, including itself; 0: all. rope: whether queries and keys are rotated; local_rope: by the angles
    of the model's local_rope_theta. keys_of: an earlier layer whose keys and values are read, in place of k_proj,
    v_proj and a cache; None: the layer has its own.
    """

    num_heads: Annotated[int, bounds(1, 1 << 14)]
    num_kv_heads: Annotated[int, bounds(1, 1 << 14)]
    head_dim: Annotated[int, bounds(1, 1 << 14)]
    qkv_bias: bool = field(default=False, kw_only=True)
    o_bias: bool = field(default=False, kw_only=True)
    qk_norm_eps: NotNegative = field(default=0.0, kw_only=True)
    qk_norm_whole: bool = field(default=False, kw_only=True)
    sliding_window: Annotated[int, bounds(0, 1 << 31)] = field(default=0, kw_only=True)
    rope: bool = field(default=True, kw_only=True)
    local_rope: bool = field(default=False, kw_only=True)
    keys_of: int | None = field(default=None, kw_only=True)

    wide_value: ClassVar[int] = 0  # 1: a kv head has two keys, of a pair of sub-heads, and a value of 2 head_dim

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise DiffbitError(
                f"num_heads is {self.num_heads}, wanted a multiple of num_kv_heads, which is {self.num_kv_heads}"
            )
        shared = self.num_heads // self.num_kv_heads
        if shared % self.noise_ratio:
            raise DiffbitError(
                f"noise_ratio is {self.noise_ratio}, wanted a divisor of {shared}, the number of heads per kv head"
            )
        if self.head_dim % 2:
            raise DiffbitError(f"head_dim is {self.head_dim}, wanted an even number: rotary embedding rotates pairs")
        if self.sliding_window and self.keys_of is not None:
            raise DiffbitError("sliding_window and keys_of are both set; another layer's keys are always all read")

    @staticmethod
    @abstractmethod
    def equal_heads(pairs: int) -> tuple[int, int]: ...

    @property
    def noise_ratio(self) -> int:
        """Signal heads per noise head, in variants that have noise heads."""
        return 1

    @property
    def query_rows(self) -> int:
        """Rows of queries."""
        return self.softmaxes * self.head_dim

    @property
    def rows(self) -> dict[str, int]:
        """Rows of the linears that read x."""
        keys = {} if self.keys_of is not None else dict.fromkeys(("k_proj", "v_proj"), self.cache_heads * self.head_dim)
        return {"q_proj": self.query_rows} | keys

    @property
    def width(self) -> int:
        """Width of the output of all heads: columns of o_proj."""
        return self.softmaxes * self.head_dim

    @property
    def cache_heads(self) -> int:
        """Heads in the KV cache, each head_dim wide; k_proj and v_proj have rows for as many."""
        return self.num_kv_heads

    @property
    def in_place(self) -> str:
        """Whether a float cache can use one buffer for past and present (ops/cache.py): DiffAttention's kernel writes
        into the buffer, its body returns a longer one."""
        return "native"

    @property
    def rope_width(self) -> int:
        return self.head_dim if self.rope else 0

    @property
    def uses_local_rope(self) -> bool:
        return self.local_rope

    @property
    def reads(self) -> int | None:
        return self.keys_of

    @property
    def carried(self) -> tuple[tuple[int | str, ...], ...]:
        """Keys and values of all tokens, as in the cache; a sliding window's cache lacks the oldest and offers none."""
        return () if self.sliding_window else ((self.cache_heads, TOKENS, self.head_dim),) * 2

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        if self.keys_of is not None:
            return ()
        return kv(self.cache_heads, self.head_dim, self.in_place, self.sliding_window)

    def seen(self, context: int) -> int:
        """Return how many of `context` tokens the last one sees."""
        return min(context, self.sliding_window or context)

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Return the operations of the softmaxes; a variant adds its own."""
        context = self.seen(context)
        products = self.softmaxes * self.head_dim * context
        rotated = (self.softmaxes + (self.cache_heads if self.keys_of is None else 0)) * self.head_dim
        turns = 2 * (self.qk_norm_eps > 0) + 2 * self.rope  # a norm takes as many operations as RoPE
        return Operations(products, products, 2 * self.softmaxes * context + turns * rotated)

    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> State:
        if self.keys_of is not None:
            return FixedState()
        return LayerCache.empty((batch, self.cache_heads, capacity, self.head_dim), dtype, device)


class Attention(Mixer):
    """A mixer of softmaxes, in one branch or two. It can also be computed explicitly, with low-bit products
    (`arithmetic`) or with a hook that sees or replaces the logits."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def __init__(self, options: AttentionOptions, place: Place) -> None:
        super().__init__(place, options.width, bias=options.qkv_bias, o_bias=options.o_bias, **options.rows)
        self.rope, self.local_rope, self.keys_of = options.rope, options.local_rope, options.keys_of
        eps, width, self.norms_whole = options.qk_norm_eps, options.head_dim, options.qk_norm_whole
        widths = (options.query_rows, options.cache_heads * width) if self.norms_whole else (width, width)
        self.q_norm, self.k_norm = (RMSNorm(width, eps) if eps else nn.Identity() for width in widths)
        self.num_heads, self.num_kv_heads, self.head_dim = options.num_heads, options.num_kv_heads, options.head_dim
        self.scale, self.cached_width = self.head_dim**-0.5, self.head_dim  # the latter: of a row of cached values
        self.sliding_window = options.sliding_window
        self.logits_hook: LogitsHook | None = None  # gets the scaled logits and returns the logits to use
        self.arithmetic: Arithmetic | None = None  # replaces the two matrix products

    @property
    def explicit(self) -> bool:
        """Whether the logits must be computed explicitly."""
        return self.logits_hook is not None or self.arithmetic is not None

    def lambda_value(self) -> Tensor | None:
        """Return lambda as an fp32 scalar; None if there is none, or if it depends on the token."""
        return None

    def queries(self, x: Tensor) -> Tensor:
        """Return query sub-heads [B, S, branches * num_heads, d], not yet rotated, those of a pair adjacent."""
        return self._normed(self.query_rows(x), self.q_norm)

    def query_rows(self, x: Tensor) -> Tensor:
        """Return q_proj's rows [B, S, branches * num_heads * d]."""
        rows: Tensor = self.q_proj(x)
        return rows

    def _normed(self, rows: Tensor, norm: nn.Module) -> Tensor:
        """Split queries or keys [B, S, H * d] into normed heads [B, S, H, d]."""
        if self.norms_whole:
            return norm(rows).unflatten(-1, (-1, self.head_dim))
        return norm(rows.unflatten(-1, (-1, self.head_dim)))

    def _onnx_normed(self, g: Graph, heads: Value, norm: nn.Module, name: str) -> Value:
        """Add the norm [d] of each of the heads [B, S, H * d], or of all together, if there is one."""
        if isinstance(norm, nn.Identity):
            return heads
        if self.norms_whole:
            return g.norm(heads, norm, name)
        normed = g.norm(g.op("Reshape", [heads, g.const([0, 0, -1, self.head_dim])]), norm, name)
        return g.op("Reshape", [normed, g.const([0, 0, -1])])

    def projected(self, x: Tensor, rope: Rope, state: State | None, carried: Carried) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [B, branches * num_heads, S, d], and all tokens' cached key and value [B, Hk, T, d]."""
        query = self._rotated(self.queries(x), rope)
        if self.keys_of is not None:
            key, value = carried[self.keys_of]
            return query, key, value
        key = self._rotated(self._normed(self.k_proj(x), self.k_norm), rope)
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if state is not None:
            assert isinstance(state, LayerCache)
            key, value = state.append(key, value)
        if self.gives:
            carried[self.layer_index] = key, value
        return query, key, value

    def _rotated(self, heads: Tensor, rope: Rope) -> Tensor:
        """Apply RoPE and transpose: [B, S, heads, d] -> [B, heads, S, d]."""
        table = rope[2:] if self.local_rope else rope[:2]
        return (apply_rope(heads, table) if self.rope else heads).transpose(1, 2)

    def onnx_rows(self, g: Graph, x: Value) -> Projected:
        """Add nodes for the rows of q_proj, k_proj and v_proj; another layer's key and value are None."""
        if self.keys_of is not None:
            return g.linear(x, self.q_proj, "q_proj"), None, None
        query, key, value = g.linears(x, {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj})
        return query, key, value

    def onnx_projected(self, g: Graph, x: Value) -> Projected:
        """Add nodes for query, key and value of x, not yet rotated; another layer's key and value are None."""
        query, key, value = self.onnx_rows(g, x)
        query = self._onnx_normed(g, query, self.q_norm, "q_norm")
        return query, None if key is None else self._onnx_normed(g, key, self.k_norm, "k_norm"), value

    def onnx_gates(self, g: Graph, x: Value) -> Value | None:
        """Add the gates of a mixture of heads, float32 [B, S, H]; None: the variant is none."""
        return None

    def onnx_attention(
        self,
        g: Graph,
        x: Value,
        lambda_: Value | None,
        past: Cache,
        heads: Heads,
        change: Change | None = None,
        gates: Value | None = None,
    ) -> tuple[Value, Cache]:
        """Add Graph.attention of x with these heads, and with the layer's own or another layer's keys and values."""
        projected = self.onnx_projected(g, x)
        source = past if self.keys_of is None else g.carried[self.keys_of]
        heads = replace(heads, rope=self.rope, local_rope=self.local_rope, sliding_window=self.sliding_window)
        out, present = g.attention(*projected, lambda_, source, heads, change, gates)
        if self.gives:
            g.carried[self.layer_index] = present
        return out, present

    def by_branch(self, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
        """Split cached heads [B, Hk, T, d] into each branch's keys [B, G, T, d] and the values [B, G, T, e]."""
        return [key], value

    def branches(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Return softmax(q k^T * scale) v [B, H, S, e] of each branch: signal and noise, or one. Arguments: from
        `projected`.

        A low-bit cache keeps the first tokens in float16, and quantizes others in blocks, so rows of a padded batch are
        computed without padding.
        """
        real = None if mask is None or self.arithmetic is None else mask[:, 0].any(1)  # [B, T]
        if mask is not None and real is not None and not real.all():
            return self._branches_of_rows(query, key, value, mask, real)
        visible = within(mask, query.shape[2], key.shape[2], self.sliding_window, query.device)
        keys, value = self.by_branch(key, value)
        count = len(keys)
        if self.explicit:
            arithmetic = self.arithmetic or Arithmetic()
            parts = [self.logits(arithmetic, query[:, i::count], keys[i], i) for i in range(count)]
            logits = torch.stack(parts, dim=2).flatten(1, 2)  # the hook sees those of all sub-heads at once
            probabilities = self.probabilities(logits, mask, visible)
            return [arithmetic.mix(probabilities[:, i::count], value, self.cached_width) for i in range(count)]
        if keys[0] is keys[-1]:  # one call for all branches
            out = attend(query, keys[0], value, visible, self.scale)
            return [out[:, i::count] for i in range(count)]
        return [attend(query[:, i::count], keys[i], value, visible, self.scale) for i in range(count)]

    def probabilities(self, logits: Tensor, mask: Tensor | None, visible: Tensor | None) -> Tensor:
        """Return softmax(logits) [B, softmaxes, S, T]. visible: the mask within the window. A variant may change it."""
        return explicit_softmax(logits, visible, self.logits_hook)

    def logits(self, arithmetic: Arithmetic, query: Tensor, key: Tensor, branch: int) -> Tensor:
        """Return the scaled logits [B, H, S, T] of a branch of the explicit form."""
        return arithmetic.logits(query, key, self.scale, branch)

    def _branches_of_rows(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, real: Tensor) -> list[Tensor]:
        """`branches` row by row, of the tokens that are `real`, bool [B, T]; zeros for the others."""
        keys, wide = self.by_branch(key, value)
        shape = len(query), query.shape[1] // len(keys), query.shape[2], wide.shape[-1]
        outs = [torch.zeros(shape, device=query.device) for _ in keys]
        for row, seen in enumerate(real):
            batch, asked = slice(row, row + 1), seen[-query.shape[2] :]
            if asked.any():
                states = query[batch][:, :, asked], key[batch][:, :, seen], value[batch][:, :, seen]
                for out, branch in zip(outs, self.branches(*states, mask[batch][:, :, asked][..., seen]), strict=True):
                    out[row, :, asked] = branch[0]
        return outs


Fused = Callable[..., Tensor | None]
"""(query [B, S, 2H, d], key [B, S, 2KV, d], or [B, S, KV, d] of both branches, value [B, S, KV, e], lambda fp32
[B, H, S], scale, norm_eps) -> causal differential attention, normed, [B, S, H, e]; None: not for this type or width."""


class Differential(Attention):
    """The difference of a pair's branches, signal - lambda * noise, and the head norm if norm_eps is not 0.

    Grouped (arXiv 2510.06949): noise_ratio = R neighbouring heads share one noise head; the noise of head i is that of
    noise head i // R. Rows of q_proj are in groups of R signal heads followed by their noise head: H + H/R sub-heads.
    """

    norm_eps = 0.0

    def __init__(self, options: AttentionOptions, place: Place) -> None:
        super().__init__(options, place)
        self.noise_ratio = options.noise_ratio
        self.fused: Fused | None = None  # computes both branches and the norm, without mask, state, window or hook

    def queries(self, x: Tensor) -> Tensor:
        queries = super().queries(x)
        return queries if self.noise_ratio == 1 else in_pairs(queries, self.noise_ratio)

    def lambda_of(self, x: Tensor) -> Tensor:
        """Return lambda, fp32: a scalar, or [B, H, S, 1] for each head and token of x."""
        raise NotImplementedError

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        query, key, value = self.projected(x, rope, state, carried)
        lambda_ = self.lambda_of(x)
        windowed = 0 < self.sliding_window < x.shape[1]
        if self.fused is not None and mask is None and state is None and not (self.explicit or windowed):
            by_token = [heads.transpose(1, 2) for heads in (query, key, value)]  # [B, S, heads, d]
            by_token[2] = by_token[2].unflatten(2, (self.num_kv_heads, -1)).flatten(3)  # [B, S, KV, e]
            lambdas = lambda_.expand(len(x), self.num_heads, x.shape[1], 1).squeeze(-1)
            if (difference := self.fused(*by_token, lambdas, self.scale, self.norm_eps)) is not None:
                return difference.flatten(2)
        signal, noise = (branch.float() for branch in self.branches(query, key, value, mask))
        out = signal - lambda_ * noise  # [B, H, S, e]
        if self.norm_eps:
            out = F.rms_norm(out, out.shape[-1:], eps=self.norm_eps)
        return out.to(x.dtype).transpose(1, 2).flatten(2)
