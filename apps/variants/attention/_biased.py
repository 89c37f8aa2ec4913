"""A bias of attention's logits that depends on positions, for each variant of the core: position biases and patterns.

    A = softmax(q k^T / sqrt d + b(t, s))      t, s: positions of query and key, counted over real tokens

A class that inherits from Biased and from a variant gives it the bias: `b` is one function of positions, written with
the operators of torch or of the graph. Its body (_changed.py) holds biases [H, S, T].
"""

from __future__ import annotations

from torch import Tensor

from ....models.attention import Attention, AttentionOptions
from ....models.layers import explicit_softmax
from ....models.mixers import Cache, Change, Graph, Heads, Value
from ....ops import body, diff_attention_body
from ._changed import Changed


class BiasedBody(diff_attention_body.AttentionBody):
    """bias: float32 [1 or B, 1 or H, S, all tokens], of which a window leaves those from `base`."""

    def _weights(self, scores: body.Value) -> body.Value:
        bias = self.inputs["bias"].slice(self.base, body.END, 3) if self.of.sliding_window else self.inputs["bias"]
        bias = bias.expand(1, self.H, 1, 1).reshape(0, self.G, 1, self.r, self.S, self.T)
        return super()._weights(scores + bias)


BIASED = Changed("BiasedAttention", ("bias",), BiasedBody)


class BiasedOptions(AttentionOptions):
    @property
    def in_place(self) -> str:
        return "never"


class Biased(Attention):
    @property
    def explicit(self) -> bool:
        return True

    def bias_of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the bias, fp32 [B, 1 or H, S, T], from positions, int64 [B, 1, S, 1] and [B, 1, 1, T]."""
        raise NotImplementedError

    def onnx_bias_of(self, g: Graph, query: Value, key: Value) -> Value:
        """Add `bias_of` as ONNX nodes."""
        raise NotImplementedError

    def probabilities(self, logits: Tensor, mask: Tensor | None, visible: Tensor | None) -> Tensor:
        softmaxes, length, total = logits.shape[1:]
        real = logits.new_ones(1, total) if mask is None else mask[:, 0, -1]  # the last query sees all real tokens
        key = real.long().cumsum(-1) - 1
        bias = self.bias_of(key[:, None, total - length :, None], key[:, None, None, :])
        if bias.shape[1] > 1:  # both branches of a pair have that of their head
            bias = bias.repeat_interleave(softmaxes // bias.shape[1], 1)

        def biased(logits: Tensor, valid: Tensor) -> Tensor:
            return (self.logits_hook(logits, valid) if self.logits_hook else logits) + bias

        return explicit_softmax(logits, visible, biased)

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
        return super().onnx_attention(g, x, lambda_, past, heads, (BIASED, [self._onnx_bias(g, x)]), gates)

    def _onnx_bias(self, g: Graph, x: Value) -> Value:
        key = g.op("Sub", [g.op("CumSum", [g.attention_mask, g.const(1)]), g.const(1)])  # [B, T]
        total = g.op("Shape", [g.attention_mask], start=1)
        length = g.op("Shape", [x], start=1, end=2)  # of the last tokens, not of all new ones (Graph.attention)
        query = g.op("Slice", [key, g.op("Sub", [total, length]), total, g.const([1])])
        return self.onnx_bias_of(
            g, g.op("Unsqueeze", [query, g.const([1, 3])]), g.op("Unsqueeze", [key, g.const([1, 2])])
        )
