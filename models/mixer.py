"""What stands in the first half of a layer: attention in one of its variants, or another mixer of tokens.

A mixer is one file, in attention/ or in mixers/, found by listing the folder. The file has

    Options    a frozen dataclass, which config.json and manifests hold field by field: sizes, and what else of the
               mathematics a layer may choose. It also answers all that can be known without weights
    a Mixer    the module that `Options.module` makes

`Block` and this base class do the rest: the norm before the mixer, and behind its heads the sub-norm and o_proj.

    y = out_scale * W_o attn_sub_norm(heads(x)) + b_o       attn_sub_norm in layers with sub_norms only, b_o with o_bias

Rules for its parameters: the name of each linear ends in _proj, and of nothing else; all linears but o_proj and those
in `MixerOptions.inner` read x, which is the normed residual stream, and nothing else reads it, so that methods can put
a rotation or scales there. Inner ones read what the mixer makes of x, such as a convolution's output: methods that
change weights before rounding leave them as they are, those that round calibrate on what reaches them. What is neither
a `weight` nor a `bias` stays float32 in a model of any dtype, such as lambda_q1.

The module is called self_attn in every layer, as in checkpoints, whatever the mixer is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DiffbitError
from ..ops.cache import Buffer
from .checks import check_flag, check_heads, check_positive
from .graph import Cache, Graph
from .layers.norm import RMSNorm
from .layers.rope import Rope, apply_rope
from .layers.softmax import Arithmetic, LogitsHook, attend, explicit_softmax, in_one_kernel
from .layers.state import LayerCache, State

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Place:
    """The layer that a mixer or an MLP stands in. sub_norm_eps: of the norms before o_proj and down_proj, None where
    the layer has none."""

    index: int
    hidden_size: int
    sub_norm_eps: float | None = None

    def sub_norm(self, width: int) -> nn.Module:
        """What stands before an output projection: with a norm there a BitLinear rounds numbers of known size (arXiv
        2402.17764, section 2; SubLN, 2210.06423)."""
        return nn.Identity() if self.sub_norm_eps is None else RMSNorm(width, self.sub_norm_eps)


@dataclass(frozen=True)
class Symmetries:
    """What may change in a mixer's weights while it computes the same: what methods use that run before rounding
    (quantize/methods/). The defaults hold for any mixer: nothing.

    value_width   w: rows of v_proj in blocks of w, a block per kv head, and columns of o_proj in blocks of w, a block
                  per head, may be multiplied by any orthogonal [w, w] matrix, one per kv head, Q^T W_v and W_o Q; head
                  i reads the value of kv head i // (heads / kv heads). 0: they may not. Here and below a bias of
                  v_proj, q_proj or k_proj changes as a column of its weight does.
    value_scales  whether those matrices may also be diagonal: the value's channels scaled one by one
    key_of        the key sub-head that each query sub-head meets: rows j and j + d/2 of a key sub-head, which RoPE
                  turns as a pair, and of all query sub-heads that meet it may be turned by any one angle. (): they may
                  not.
    """

    value_width: int = 0
    value_scales: bool = False
    key_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operations:
    """What one token costs in a mixer, its linears apart: multiply-adds.

    logits  of queries with keys: integer ones where a scheme rounds queries
    matrix  of the other float products, such as those with values or of a state
    other   done element by element: RoPE, softmax, differences, norms
    """

    logits: int = 0
    matrix: int = 0
    other: int = 0


KVBuffers = Callable[[int, int, str], tuple[Buffer, ...]]
"""(heads, their width, in_place) -> the buffers of keys and values under the scheme at hand. in_place: whether float
ones can be bound as past and present at once (ops/cache.py)."""


@dataclass(frozen=True)
class MixerOptions(ABC):
    @property
    def name(self) -> str:
        """Of the mixer's file."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def module(self, place: Place) -> Mixer: ...

    @abstractmethod
    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        """What an artifact keeps of the tokens so far: `kv(...)`, buffers of its own, or both."""

    @abstractmethod
    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """The same in torch; capacity in tokens."""

    @abstractmethod
    def operations(self, context: int, low_bit: bool) -> Operations:
        """context: tokens so far, this one among them. low_bit: are the cache or the logits in low bits?"""

    def symmetries(self) -> Symmetries:
        """A file that inherits another's says here what still holds; what does not is found when a method tries it."""
        return Symmetries()

    @property
    def inner(self) -> tuple[str, ...]:
        """Linears beside o_proj that do not read x."""
        return ()

    @property
    def rope_width(self) -> int:
        """Width of the heads that RoPE turns; 0: the layer has no use for positions."""
        return 0

    @property
    def head_norm(self) -> bool:
        """Is there an RMSNorm of each head's output?"""
        return False

    @property
    def softmaxes(self) -> int:
        """Rows of attention weights that a token has."""
        return 0

    def joint_rows(self) -> dict[str, int]:
        """{"q_proj": R, ...}: each R neighbouring rows meet in one head, both branches of a pair where they have rows
        of their own (quantize/methods/joint.py)."""
        return {}


class Mixer(nn.Module):
    out_scale = 1.0  # the factor on o_proj's product
    o_proj: nn.Module

    def __init__(self, place: Place, width: int, *, bias: bool = False, o_bias: bool = False, **rows: int) -> None:
        """rows: {name: out_features} of the linears that read x, with a bias or none. width: of what `heads` returns.
        o_bias: has o_proj a bias?"""
        super().__init__()
        self.layer_index = place.index
        for name, count in rows.items():
            self.add_module(name, nn.Linear(place.hidden_size, count, bias=bias))
        self.attn_sub_norm = place.sub_norm(width)
        self.o_proj = nn.Linear(width, place.hidden_size, bias=o_bias)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None) -> Tensor:
        """What the mixer finds: x [B, S, E] -> [B, S, width].

        rope: cos, sin, fp32 [B, S, rope_width / 2]. mask: bool [B, 1, S, T], where a query may look, None where
        causality alone decides (layers/masks.py). state: as `MixerOptions.state` made it, with the tokens before x; x
        is added.
        """
        raise NotImplementedError

    def onnx_heads(self, g: Graph, x: ir.Value, past: Cache) -> tuple[ir.Value, Cache]:
        """`heads` as ONNX nodes; past, and what is returned beside the heads: the layer's buffers by their names."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep its own parameters, such as lambda vectors, float32 when the model is moved with .to(bfloat16), ..."""
        before = {name: parameter.detach() for name, parameter in self.named_parameters(recurse=False)}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != torch.float32:
                parameter.data = kept.to(parameter.device)
        return self

    def derived(self) -> dict[str, Tensor]:
        """Numbers that follow from weights alone; they are checked to be finite when a model is put together."""
        return {}

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None, state: State | None = None) -> Tensor:
        """x [B, S, E] -> [B, S, E]."""
        out: Tensor = self.o_proj(self.attn_sub_norm(self.heads(x, rope, mask, state)))
        if self.out_scale == 1:
            return out
        out, bias = out * self.out_scale, self.o_proj.bias
        return out + (1 - self.out_scale) * bias if isinstance(bias, Tensor) else out  # a bias has no factor

    def onnx(self, g: Graph, x: ir.Value, past: Cache) -> tuple[ir.Value, Cache]:
        """`forward` as ONNX nodes."""
        heads, present = self.onnx_heads(g, x, past)
        heads = g.norm(heads, self.attn_sub_norm, "attn_sub_norm")
        return g.linear(heads, self.o_proj, "o_proj", self.out_scale), present


@dataclass(frozen=True)
class AttentionOptions(MixerOptions):
    """Sizes as the mathematics counts them: a head of a plain Transformer has one softmax, a differential head two (a
    pair of query sub-heads), each head_dim = d wide. num_kv_heads: groups of heads that share keys and values.

    qkv_bias, o_bias: have q_proj, k_proj and v_proj, has o_proj a bias? qk_norm_eps: of an RMSNorm of each query and
    key sub-head, with a weight [d] that all heads share, before RoPE; 0: there is none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = field(default=False, kw_only=True)
    o_bias: bool = field(default=False, kw_only=True)
    qk_norm_eps: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_flag("qkv_bias", self.qkv_bias)
        check_flag("o_bias", self.o_bias)
        if self.qk_norm_eps != 0:
            check_positive("qk_norm_eps", self.qk_norm_eps)

    @staticmethod
    @abstractmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        """(num_heads, num_kv_heads) of a model as large as diff_v1 with that many pairs, for fair twins."""

    @property
    def query_rows(self) -> int:
        """Of q_proj."""
        return self.softmaxes * self.head_dim

    @property
    def width(self) -> int:
        """Of what all heads together return: columns of o_proj."""
        return self.softmaxes * self.head_dim

    @property
    def cache_heads(self) -> int:
        """Heads in the KV cache, each head_dim wide; k_proj and v_proj have rows for as many."""
        return self.num_kv_heads

    @property
    def in_place(self) -> str:
        """Whether a float cache can be one memory for past and present (ops/cache.py): DiffAttention's kernel writes
        into its buffer, its body returns a longer one."""
        return "native"

    @property
    def rope_width(self) -> int:
        return self.head_dim

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        return kv(self.cache_heads, self.head_dim, self.in_place)

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Of softmaxes alone: a variant adds its own."""
        products = self.softmaxes * self.head_dim * context
        rotated = (self.softmaxes + self.cache_heads) * self.head_dim
        turns = 4 if self.qk_norm_eps else 2  # a norm takes as many as RoPE
        return Operations(products, products, 2 * self.softmaxes * context + turns * rotated)

    def joint_rows(self) -> dict[str, int]:
        queries, keys = self.softmaxes // self.num_heads, self.cache_heads // self.num_kv_heads
        return {"q_proj": queries * self.head_dim} | dict.fromkeys(("k_proj", "v_proj"), keys * self.head_dim)

    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        return LayerCache.empty((batch, self.cache_heads, capacity, self.head_dim), dtype, device)


class Attention(Mixer):
    """A mixer of softmaxes, in one branch or two. It can be computed step by step, with other products than float ones
    (low-bit attention) and with its logits seen or replaced (outliers)."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def __init__(self, options: AttentionOptions, place: Place) -> None:
        keys = options.cache_heads * options.head_dim
        super().__init__(
            place,
            options.width,
            bias=options.qkv_bias,
            o_bias=options.o_bias,
            q_proj=options.query_rows,
            k_proj=keys,
            v_proj=keys,
        )
        eps = options.qk_norm_eps
        self.q_norm, self.k_norm = (RMSNorm(options.head_dim, eps) if eps else nn.Identity() for _ in "qk")
        self.num_heads, self.num_kv_heads, self.head_dim = options.num_heads, options.num_kv_heads, options.head_dim
        self.scale = self.head_dim**-0.5
        self.logits_hook: LogitsHook | None = None  # sees the scaled logits; what it returns takes their place
        self.arithmetic: Arithmetic | None = None  # takes the place of the two matrix products

    @property
    def explicit(self) -> bool:
        """Are the logits to be computed for themselves?"""
        return self.logits_hook is not None or self.arithmetic is not None

    def lambda_value(self) -> Tensor | None:
        """What the noise branch is multiplied by, a fp32 scalar; None where there is none, or one for each token."""
        return None

    def queries(self, x: Tensor) -> Tensor:
        """Query sub-heads, [B, S, branches * num_heads, d], those of a pair side by side, not yet rotated."""
        found: Tensor = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        return found

    def _onnx_normed(self, g: Graph, heads: ir.Value, norm: nn.Module, name: str) -> ir.Value:
        """heads [B, S, H * d], each through a norm [d] where one stands there."""
        if isinstance(norm, nn.Identity):
            return heads
        each = g.norm(g.op("Reshape", [heads, g.const([0, 0, -1, self.head_dim])]), norm, name)
        return g.op("Reshape", [each, g.const([0, 0, -1])])

    def projected(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, branches * num_heads, d] and key [B, S, Hk, d], rotated, and value [B, S, Hk, d]."""
        query = apply_rope(self.queries(x), rope)
        key = apply_rope(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        return query, key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def onnx_projected(self, g: Graph, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The same as ONNX nodes, not yet rotated."""
        query, key, value = g.linears(x, {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj})
        query = self._onnx_normed(g, query, self.q_norm, "q_norm")
        return query, self._onnx_normed(g, key, self.k_norm, "k_norm"), value

    def by_branch(self, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
        """Cached heads [B, Hk, T, d] -> the keys of each branch [B, G, T, d], and the values of all [B, G, T, e]."""
        return [key], value

    def branches(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None) -> list[Tensor]:
        """softmax(q k^T * scale) v of each branch, [B, H, S, e]; of a pair, signal and noise."""
        return self._branches(*self.projected(x, rope), mask, state)

    def _branches(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, state: State | None
    ) -> list[Tensor]:
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, heads, S, d]
        if state is not None:
            assert isinstance(state, LayerCache)
            key, value = state.append(key, value)  # [B, Hk, T, d]
        keys, value = self.by_branch(key, value)
        count = len(keys)
        if self.explicit:
            arithmetic = self.arithmetic or Arithmetic()
            each = [arithmetic.logits(query[:, i::count], keys[i], self.scale, i) for i in range(count)]
            logits = torch.stack(each, dim=2).flatten(1, 2)  # the hook sees those of all sub-heads at once
            probabilities = explicit_softmax(logits, mask, self.logits_hook)  # [B, softmaxes, S, T]
            return [arithmetic.mix(probabilities[:, i::count], value, self.head_dim) for i in range(count)]
        if keys[0] is keys[-1]:  # one call for all branches
            found = attend(query, keys[0], value, mask, self.scale)
            return [found[:, i::count] for i in range(count)]
        return [attend(query[:, i::count], keys[i], value, mask, self.scale) for i in range(count)]


class Differential(Attention):
    """The difference of both branches of a pair, signal - lambda * noise, and the head norm where norm_eps is not 0."""

    norm_eps = 0.0

    def lambda_of(self, x: Tensor) -> Tensor:
        """lambda, fp32: a scalar, or [B, H, S, 1], one for each head and token of x."""
        raise NotImplementedError

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None) -> Tensor:
        query, key, value = self.projected(x, rope)
        lambda_ = self.lambda_of(x)
        if not self.explicit and in_one_kernel(query, mask, state):
            from .layers.triton_attention import diff_attention

            each = lambda_.expand(len(x), self.num_heads, x.shape[1], 1).squeeze(-1)
            wide = value.unflatten(2, (self.num_kv_heads, -1)).flatten(3)  # [B, S, KV, e]
            return diff_attention(query, key, wide, each, self.scale, self.norm_eps).flatten(2)
        signal, noise = (branch.float() for branch in self._branches(query, key, value, mask, state))
        out = signal - lambda_ * noise  # [B, H, S, e]
        if self.norm_eps:
            out = F.rms_norm(out, out.shape[-1:], eps=self.norm_eps)
        return out.to(x.dtype).transpose(1, 2).flatten(2)


def check_derived(module: nn.Module) -> None:
    """A DiffbitError that names the layer where a number computed from its weights is infinite or NaN."""
    for part in module.modules():
        if isinstance(part, Mixer):
            for what, value in part.derived().items():
                if not value.isfinite().all():
                    raise DiffbitError(
                        f"model.layers.{part.layer_index}.self_attn: {what}, computed from its weights, is "
                        f"{value.flatten()[0].item()}; the checkpoint is damaged"
                    )
