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

A mixer can read what an earlier layer found: another's keys and values, or its heads. `reads` names that layer, and
`carried` says what there is to read; which layers hand something on follows from the readers (Place.gives).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from ..ops.cache import Buffer
from .graph import Cache, Graph
from .layers.norm import RMSNorm
from .layers.rope import Rope
from .layers.state import Carried, State

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Place:
    """The layer that a mixer or an MLP stands in. sub_norm_eps: of the norms before o_proj and down_proj, None where
    the layer has none. gives: does a later layer read what the mixer finds?"""

    index: int
    hidden_size: int
    sub_norm_eps: float | None = None
    gives: bool = False

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


KVBuffers = Callable[[int, int, str, int], tuple[Buffer, ...]]
"""(heads, their width, in_place, sliding_window) -> the buffers of keys and values under the scheme at hand. in_place:
whether float ones can be bound as past and present at once (ops/cache.py). sliding_window: as of AttentionOptions."""


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
    def reads(self) -> int | None:
        """The earlier layer whose values it reads; None: none's."""
        return None

    @property
    def carried(self) -> tuple[tuple[int | str, ...], ...]:
        """Shapes of the values that it reads, or, where it reads none, that it can hand on: without the batch, "tokens"
        for one entry a token."""
        return ()

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
        self.layer_index, self.gives = place.index, place.gives
        for name, count in rows.items():
            self.add_module(name, nn.Linear(place.hidden_size, count, bias=bias))
        self.attn_sub_norm = place.sub_norm(width)
        self.o_proj = nn.Linear(width, place.hidden_size, bias=o_bias)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        """What the mixer finds: x [B, S, E] -> [B, S, width].

        rope: cos, sin, fp32 [B, S, rope_width / 2]. mask: bool [B, 1, S, T], where a query may look, None where
        causality alone decides (layers/masks.py). state: as `MixerOptions.state` made it, with the tokens before x; x
        is added. carried: what earlier layers handed on; with `gives`, carried[layer_index] is added.
        """
        raise NotImplementedError

    def onnx_heads(self, g: Graph, x: ir.Value, past: Cache) -> tuple[ir.Value, Cache]:
        """`heads` as ONNX nodes; past, and what is returned beside the heads: the layer's buffers by their names.
        What is carried lies in g.carried."""
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

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor | None = None,
        state: State | None = None,
        carried: Carried | None = None,
    ) -> Tensor:
        """x [B, S, E] -> [B, S, E]."""
        heads = self.heads(x, rope, mask, state, {} if carried is None else carried)
        out: Tensor = self.o_proj(self.attn_sub_norm(heads))
        if self.out_scale == 1:
            return out
        out, bias = out * self.out_scale, self.o_proj.bias
        return out + (1 - self.out_scale) * bias if isinstance(bias, Tensor) else out  # a bias has no factor

    def onnx(self, g: Graph, x: ir.Value, past: Cache) -> tuple[ir.Value, Cache]:
        """`forward` as ONNX nodes."""
        heads, present = self.onnx_heads(g, x, past)
        heads = g.norm(heads, self.attn_sub_norm, "attn_sub_norm")
        return g.linear(heads, self.o_proj, "o_proj", self.out_scale), present
