"""Mixers: the first half of a layer, an attention variant or another mixer of tokens.

A mixer is one file, in attention/ or in mixers/, found by listing the folder. The file has

    Options    a frozen dataclass, stored field by field in config.json and manifests: sizes and other choices. It also
               answers all questions that need no weights
    a Mixer    the module that `Options.module` makes

`Block` and this base class add the norm before the mixer, and the sub-norm and o_proj after its heads.

    y = out_scale * W_o attn_sub_norm(heads(x)) + b_o       attn_sub_norm in layers with sub_norms only, b_o with o_bias

Rules for its parameters: names of linears, and only these, end in _proj. All linears except o_proj and those in
`MixerOptions.inner` read x, the normed residual stream, and nothing else reads it, so that methods can insert a
rotation or scales there. Inner linears read something computed from x, such as a convolution's output: methods that
change weights before rounding skip them, and methods that round calibrate on their inputs. Parameters other than
`weight` and `bias`, such as lambda_q1, stay float32 in a model of any dtype.

The module is called self_attn in every layer, as in checkpoints, whatever the mixer is.

A mixer can read values of an earlier layer, such as its keys and values or its heads. `reads` names that layer, and
`carried` describes the values; a layer passes values on if a later one reads them (Place.gives).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from ...io.fields import check
from ...ops.cache import Buffer
from ..graph import Cache, Graph, Value
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.state import Carried, FixedState, State


@dataclass(frozen=True)
class Place:
    """The layer that a mixer or an MLP belongs to. sub_norm_eps: of the norms before o_proj and down_proj; None: it has
    none. gives: whether a later layer reads the mixer's values."""

    index: int
    hidden_size: int
    sub_norm_eps: float | None = None
    gives: bool = False

    def sub_norm(self, width: int) -> nn.Module:
        """Return the norm before an output projection, or nn.Identity. With a norm, a BitLinear rounds numbers of known
        size (arXiv 2402.17764, section 2; SubLN, 2210.06423)."""
        return nn.Identity() if self.sub_norm_eps is None else RMSNorm(width, self.sub_norm_eps)


@dataclass(frozen=True)
class Symmetries:
    """Changes of a mixer's weights that keep its function, for methods that run before rounding (quantize/methods/).
    The defaults allow no change, so they hold for any mixer.

    value_width   w: rows of v_proj in blocks of w, a block per kv head, and columns of o_proj in blocks of w, a block
                  per head, may be multiplied by any orthogonal [w, w] matrix, one per kv head, Q^T W_v and W_o Q; head
                  i reads the value of kv head i // (heads / kv heads). 0: not allowed. Here and below, a bias of
                  v_proj, q_proj or k_proj changes like a column of its weight.
    value_scales  whether those matrices may also be diagonal: scales of the value's channels
    key_of        the key sub-head of each query sub-head: rows j and j + d/2 of a key sub-head, which RoPE rotates as
                  a pair, may be rotated by any angle, together with those of all its query sub-heads. (): not
                  allowed.
    """

    value_width: int = 0
    value_scales: bool = False
    key_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operations:
    """Multiply-adds per token in a mixer, without its linears.

    logits  products of queries and keys; integer if a scheme rounds queries
    matrix  other float products, such as those with values or of a state
    other   elementwise operations: RoPE, softmax, differences, norms
    """

    logits: int = 0
    matrix: int = 0
    other: int = 0


Replay = Callable[[Callable[[], Tensor], Carried], Tensor]
"""(compute, carried) -> heads: what `compute()` returned for these inputs before. Computing the heads may add tensors
to `carried`, so a replay adds them, too."""

KVBuffers = Callable[[int, int, str, int], tuple[Buffer, ...]]
"""(heads, their width, in_place, sliding_window) -> the buffers of keys and values under the current scheme. in_place:
whether float ones can be bound as past and present at once (ops/cache.py). sliding_window: as in AttentionOptions."""


@dataclass(frozen=True)
class MixerOptions(ABC):
    def __post_init__(self) -> None:
        check(self)

    @property
    def name(self) -> str:
        """The name of the mixer's file."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def module(self, place: Place) -> Mixer: ...

    @abstractmethod
    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        """Return the buffers of an artifact's cache: `kv(...)`, the mixer's own buffers, or both."""

    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """Make the layer's state in torch; capacity in tokens. By default its buffers, which have a fixed size."""
        return FixedState(
            *(torch.zeros(batch, *buffer.sizes(0), device=device) for buffer in self.buffers(lambda *_: ()))
        )

    @abstractmethod
    def operations(self, context: int, low_bit: bool) -> Operations:
        """Return the cost of a token. context: tokens so far, including this one. low_bit: cache or logits are."""

    def symmetries(self) -> Symmetries:
        """Symmetries of the mixer. A subclass must override this if it has others; methods check what they use."""
        return Symmetries()

    @property
    def inner(self) -> tuple[str, ...]:
        """Linears other than o_proj that do not read x."""
        return ()

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int] | None:
        """Return (num_heads, num_kv_heads) of a model of the same size as diff_v1 with `pairs` pairs of heads; None if
        the mixer does not take attention's place in every layer."""
        return None

    @staticmethod
    def equal_sizes(pairs: int, head_dim: int) -> dict[str, int]:
        """Return other sizes of that model."""
        return {}

    @property
    def float_linears(self) -> tuple[str, ...]:
        """Linears that a scheme leaves float unless an override names them, such as a gate or a router: few parameters
        that affect every output."""
        return ()

    @property
    def rope_width(self) -> int:
        """Width of the heads that RoPE rotates; 0: the layer does not use positions."""
        return 0

    @property
    def uses_local_rope(self) -> bool:
        """Whether RoPE's angles are those of the model's `local_rope_theta`."""
        return False

    @property
    def head_norm(self) -> bool:
        """Whether each head's output has an RMSNorm."""
        return False

    @property
    def reads(self) -> int | None:
        """The earlier layer whose values it reads, or None."""
        return None

    @property
    def carried(self) -> tuple[tuple[int | str, ...], ...]:
        """Shapes of the values that it reads or, if it reads none, that it can pass on: without the batch; "tokens"
        for one entry per token."""
        return ()

    @property
    def softmaxes(self) -> int:
        """Number of softmaxes per token."""
        return 0


class Mixer(nn.Module):
    out_scale = 1.0  # the factor on o_proj's product
    rounded_state: Callable[[Tensor], Tensor] | None = None  # what each call leaves of a FixedState's tensor
    auxiliary_loss: Tensor | None = None  # a scalar of the last call in training, which `diffbit train` adds and clears
    o_proj: nn.Module

    def __init__(self, place: Place, width: int, *, bias: bool = False, o_bias: bool = False, **rows: int) -> None:
        """rows: {name: out_features} of the linears that read x; bias: whether they have one. width: of the output of
        `heads`. o_bias: whether o_proj has a bias."""
        super().__init__()
        self.layer_index, self.gives = place.index, place.gives
        for name, count in rows.items():
            self.add_module(name, nn.Linear(place.hidden_size, count, bias=bias))
        self.attn_sub_norm = place.sub_norm(width)
        self.o_proj = nn.Linear(width, place.hidden_size, bias=o_bias)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        """Return the mixer's output before sub-norm and o_proj: x [B, S, E] -> [B, S, width].

        rope: cos, sin, fp32 [B, S, rope_width / 2]. mask: bool [B, 1, S, T], the keys that a query may see; None: plain
        causality (layers/masks.py). state: from `MixerOptions.state`, with the tokens before x; x is appended to it.
        carried: values of earlier layers; if `gives`, carried[layer_index] is added.
        """
        raise NotImplementedError

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        """Add `heads` as ONNX nodes. `past` and the second result are the layer's buffers by name; carried values are
        in g.carried."""
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
        """Return numbers computed from weights alone; they are checked to be finite when a model is assembled."""
        return {}

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor | None = None,
        state: State | None = None,
        carried: Carried | None = None,
        replay: Replay | None = None,
    ) -> Tensor:
        """x [B, S, E] -> [B, S, E]. replay: in place of computing the heads again."""
        values = {} if carried is None else carried

        def compute() -> Tensor:
            return self.heads(x, rope, mask, state, values)

        heads = compute() if replay is None else replay(compute, values)
        if self.rounded_state is not None and isinstance(state, FixedState):
            state.tensors = tuple(map(self.rounded_state, state.tensors))
        out: Tensor = self.o_proj(self.attn_sub_norm(heads))
        if self.out_scale == 1:
            return out
        out, bias = out * self.out_scale, self.o_proj.bias
        return out + (1 - self.out_scale) * bias if isinstance(bias, Tensor) else out  # a bias has no factor

    def onnx(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        """Add `forward` as ONNX nodes."""
        heads, present = self.onnx_heads(g, x, past)
        heads = g.norm(heads, self.attn_sub_norm, "attn_sub_norm")
        return g.linear(heads, self.o_proj, "o_proj", self.out_scale), present
