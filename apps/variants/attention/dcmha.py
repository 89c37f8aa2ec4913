"""Dynamically composable multi-head attention (DCMHA, arXiv 2405.08553, section 2): heads mix their scores.

    A = compose(softmax(compose(q k^T / sqrt d)))        o_h = A_h v_g,   g = h // (H/KV)

For a query t and a key s, the scores of all H heads are a vector a [H], and `compose` is a matrix [H, H] that depends
on both tokens (eq. 5-7), of low rank I = 2 and a diagonal for each of them:

    compose(a) = a + (a Q1_t) Q2_t + a * Qd_t + (a K1_s) K2_s + a * Kd_s
    (W1 | W2) = GELU(x W_dw1) W_qkw,   W1 = RMSNorm(W1),   Wd = tanh(x W_dd)      of Q and K, before and after softmax

This is the authors' code (github.com/Caiyun-AI/DCFormer, pytorch/dcformer) without the static matrix W_b, which that
leaves out, too. Softmax is over the keys that t sees; weights of others stay 0.

The cache has beside keys and values K1, K2 and Kd of each token, "composition", float32 [2, T, 5 H]: before and after
softmax. With more than 5 heads, it is smaller than the matrices [2, T, H, H] that the authors' code keeps. Low bits are
those of weights, keys and values; the numbers of the composition stay float32, and so do dw1_proj and dd_proj unless an
override names them: they are few and change every score. The body (_changed.py) has no kernel, and a sliding
window does not shorten the composition's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....models import LayerCache
from ....models.attention import softmax
from ....models.layers import Arithmetic, Carried, Rope, State, explicit_softmax, within
from ....models.mixers import TOKENS, Buffer, Cache, Graph, Heads, KVBuffers, Operations, Place, Value
from ....ops import body, diff_attention_body
from ._changed import Changed

RANK = 2  # I
PARTS = 2 * RANK + 1  # rows of a token's W1, W2 and Wd
NORM_EPS = 1e-6


class ComposedCache(LayerCache):
    """Keys and values, and the compositions of their tokens, fp32 [B, 2, C, 5 H]."""

    def __init__(self, key: Tensor, value: Tensor, composition: Tensor) -> None:
        super().__init__(key, value)
        self.composition = composition

    def compose(self, new: Tensor) -> Tensor:
        """Store those of the next tokens, [B, 2, S, 5 H]; return all. `append` follows."""
        end = self.length + new.shape[2]
        self.composition[:, :, self.length : end] = new.detach()
        return self.composition[:, :, :end]


@dataclass(frozen=True)
class Options(softmax.Options):
    keys_of: None = field(default=None, kw_only=True)

    def module(self, place: Place) -> Composable:
        return Composable(self, place)

    @property
    def in_place(self) -> str:
        return "never"

    @property
    def float_linears(self) -> tuple[str, ...]:
        return "dw1_proj", "dd_proj"

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        return *super().buffers(kv), Buffer("composition", "float32", (2, TOKENS, PARTS * self.num_heads))

    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> ComposedCache:
        key, value = torch.zeros(2, batch, self.cache_heads, capacity, self.head_dim, dtype=dtype, device=device)
        return ComposedCache(key, value, torch.zeros(batch, 2, capacity, PARTS * self.num_heads, device=device))

    def operations(self, context: int, low_bit: bool) -> Operations:
        """Two compositions, each with those of the query and the key."""
        plain = super().operations(context, low_bit)
        return replace(plain, matrix=plain.matrix + 4 * PARTS * self.num_heads * self.seen(context))


def compose(scores: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
    """Mix the heads of scores [B, H, S, T] by the parts [B, S, 5 H] and [B, T, 5 H] of queries and keys."""

    def mixed(rows: Tensor, parts: Tensor) -> Tensor:
        first, second, diagonal = parts.unflatten(-1, (PARTS, -1)).split((RANK, RANK, 1), 2)
        return rows @ first.mT @ second + rows * diagonal

    by_query, by_key = scores.permute(0, 2, 3, 1), scores.permute(0, 3, 2, 1)  # [B, S, T, H], [B, T, S, H]
    return scores + mixed(by_query, of_query).permute(0, 3, 1, 2) + mixed(by_key, of_key).permute(0, 3, 2, 1)


class ComposedBody(diff_attention_body.AttentionBody):
    """of_query, of_key: float32 [B, 2, S, 5 H] and [B, 2, T, 5 H], before and after the softmax."""

    def _weights(self, scores: body.Value) -> body.Value:
        return self._compose(super()._weights(self._compose(scores, 0)), 1)

    def _compose(self, scores: body.Value, after: int) -> body.Value:
        def mixed(rows: body.Value, name: str, begin: body.Operand) -> body.Value:
            parts = self.inputs[name].slice(after, after + 1, 1).squeeze(1).slice(begin, body.END, 1)
            first, second, diagonal = self.op.split(parts.reshape(0, 0, PARTS, self.H), 2, [RANK, RANK, 1])
            return rows @ first.transpose(0, 1, 3, 2) @ second + rows * diagonal

        rows = scores.view(self.B, self.H, self.S, self.T)
        by_query = mixed(rows.transpose(0, 2, 3, 1), "of_query", 0).transpose(0, 3, 1, 2)
        by_key = mixed(rows.transpose(0, 3, 2, 1), "of_key", self.base).transpose(0, 3, 2, 1)
        return self.op("Reshape", rows + by_query + by_key, self.op("Shape", scores), allowzero=1)


COMPOSED = Changed("ComposedAttention", ("of_query", "of_key"), ComposedBody)


class Composable(softmax.Softmax):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        heads = options.num_heads
        self.width = 4 * heads  # of the hidden layer of each of the four: of query and key, before and after
        self.dw1_proj = nn.Linear(place.hidden_size, 4 * self.width, bias=False)
        self.dd_proj = nn.Linear(place.hidden_size, 4 * heads, bias=False)
        self.qkw = nn.Parameter(torch.empty(4, self.width, 2 * RANK * heads, dtype=torch.float32))
        if not self.qkw.is_meta:  # with the deviation of the authors' JAX code, so that A begins nearly uncomposed
            generator = torch.Generator().manual_seed(place.index)
            std = 0.02 / (math.sqrt(self.width) * (heads + RANK))
            self.qkw.data = torch.randn(self.qkw.shape, generator=generator) * std

    def compositions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of x's tokens as queries and as keys, fp32 [B, 2, S, 5 H]."""
        hidden = F.gelu(self.dw1_proj(x).float().unflatten(-1, (4, 1, self.width)))
        first, second = (hidden @ self.qkw).unflatten(-1, (2 * RANK, -1)).squeeze(3).chunk(2, 3)  # [B, S, 4, I, H]
        diagonal = self.dd_proj(x).float().tanh().unflatten(-1, (4, 1, -1))
        parts = torch.cat((F.rms_norm(first, first.shape[-1:], eps=NORM_EPS), second, diagonal), 3)
        of_query, of_key = parts.flatten(3).unflatten(2, (2, 2)).permute(3, 0, 2, 1, 4)
        return of_query, of_key

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        of_query, of_key = self.compositions(x)
        if state is not None:
            assert isinstance(state, ComposedCache)
            of_key = state.compose(of_key)
        query, key, value = self.projected(x, rope, state, carried)
        real = None if mask is None or self.arithmetic is None else mask[:, 0].any(1)  # as in Attention.branches
        if mask is None or real is None or real.all():
            out = self.composed((query, of_query), (key, value, of_key), mask)
        else:
            out = torch.zeros_like(query, dtype=torch.float32)
            for row, seen in enumerate(real):
                asked = seen[-x.shape[1] :]
                if asked.any():
                    queries, keys = (
                        [tensor[row : row + 1] for tensor in of] for of in ((query, of_query), (key, value, of_key))
                    )
                    queries, keys = [tensor[:, :, asked] for tensor in queries], [tensor[:, :, seen] for tensor in keys]
                    out[row, :, asked] = self.composed(queries, keys, mask[row : row + 1, :, asked][..., seen])[0]
        return out.to(x.dtype).transpose(1, 2).flatten(2)

    def composed(self, queries: Sequence[Tensor], keys: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return the heads [B, H, S, d] of (query, of_query) and (key, value, of_key), whose dimension 2 is tokens."""
        (query, of_query), (key, value, of_key) = queries, keys
        arithmetic = self.arithmetic or Arithmetic()
        mask = within(mask, query.shape[2], key.shape[2], self.sliding_window, query.device)
        logits = compose(arithmetic.logits(query, key, self.scale, 0), of_query[:, 0], of_key[:, 0])
        weights = compose(explicit_softmax(logits, mask, self.logits_hook), of_query[:, 1], of_key[:, 1])
        return arithmetic.mix(weights, value, self.head_dim)

    def onnx_compositions(self, g: Graph, x: Value) -> list[Value]:
        def number(value: float) -> Value:
            return g.const(value, np.float32)

        hidden = g.cast(g.linear(x, self.dw1_proj, "dw1_proj"), np.float32)
        hidden = g.op("Reshape", [hidden, g.const([0, 0, 4, 1, self.width])])
        share = g.op("Add", [g.op("Erf", [g.op("Mul", [hidden, number(0.5**0.5)])]), number(1)])
        hidden = g.op("Mul", [g.op("Mul", [hidden, share]), number(0.5)])
        weight = g.weight("qkw.weight", self.qkw.detach().numpy(), np.float32)
        mixing = g.op("Reshape", [g.op("MatMul", [hidden, weight]), g.const([0, 0, 4, 2 * RANK, self.num_heads])])
        first, second = g.ops("Split", [mixing], 2, axis=3, num_outputs=2)
        power = g.op("ReduceMean", [g.op("Mul", [first, first]), g.const([4])])
        first = g.op("Div", [first, g.op("Sqrt", [g.op("Add", [power, number(NORM_EPS)])])])
        diagonal = g.op("Tanh", [g.cast(g.linear(x, self.dd_proj, "dd_proj"), np.float32)])
        diagonal = g.op("Reshape", [diagonal, g.const([0, 0, 4, 1, self.num_heads])])
        parts = g.op("Concat", [first, second, diagonal], axis=3)
        parts = g.op("Reshape", [parts, g.const([0, 0, 2, 2, PARTS * self.num_heads])])
        both = g.ops("Split", [g.op("Transpose", [parts], perm=[3, 0, 2, 1, 4])], 2, axis=0, num_outputs=2)
        return [g.op("Squeeze", [tensor, g.const([0])]) for tensor in both]

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        of_query, of_key = self.onnx_compositions(g, x)
        of_key = g.op("Concat", [past["composition"], of_key], axis=2)
        heads = Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        past = {name: buffer for name, buffer in past.items() if name != "composition"}
        out, present = self.onnx_attention(g, x, None, past, heads, (COMPOSED, (of_query, of_key)))
        return out, present | {"composition": of_key}
