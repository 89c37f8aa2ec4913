"""Differential attention, version 2 (hf.co/blog/microsoft/diff-attn-v2; unilm, Diff-Transformer-V2).

    a_j = softmax(q_j k_g^T / sqrt d) v_g    for 2H query sub-heads; both of a pair use kv head g = i // (H/KV)
    o_i = a_2i - sigmoid(lambda_i(x)) * a_2i+1,     lambda(x) = W x + b: one number per token and head

It has no head norm and no lambda_init: it is grouped-query attention with twice the query heads, then a subtraction.
The authors' lambda has no b. With b = -6 a model starts with hardly any subtraction, which training then opens.

With shared noise heads (_attention.Differential), each head still has its own lambda; Motif-3's noise_ratio is 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from ...io.fields import OMITTED, Count
from ..graph import GROUP_QUERY_MULTIPLE, Cache, Graph, Heads, Value
from ..mixers import Operations, Place
from ._attention import Differential
from .softmax import GroupQueryOptions


@dataclass(frozen=True)
class Options(GroupQueryOptions):
    """lambda_bias: whether lambda has the bias b [H]. noise_ratio: signal heads per noise head."""

    lambda_bias: bool = field(default=False, kw_only=True)
    noise_ratio: Count = field(default=1, kw_only=True, metadata=OMITTED)

    def module(self, place: Place) -> DiffV2:
        return DiffV2(self, place)

    @property
    def softmaxes(self) -> int:
        return self.num_heads + self.num_heads // self.noise_ratio

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def operations(self, context: int, low_bit: bool) -> Operations:
        """The difference is of the outputs; in low bits, of the weights, with one product with the values after it."""
        plain = super().operations(context, low_bit)
        context = self.seen(context)
        if not low_bit:
            return replace(plain, other=plain.other + self.num_heads * self.head_dim)
        return replace(plain, matrix=self.width * context, other=plain.other + self.num_heads * context)

    @property
    def float_linears(self) -> tuple[str, ...]:
        return ("lambda_proj",)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, pairs


class DiffV2(Differential):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        self.lambda_proj = nn.Linear(place.hidden_size, options.num_heads, bias=options.lambda_bias)

    def by_branch(self, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
        return [key, key], value

    def lambda_of(self, x: Tensor) -> Tensor:
        return self.lambda_proj(x).float().sigmoid().transpose(1, 2)[..., None]

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        weight = g.op("Sigmoid", [g.linear(x, self.lambda_proj, "lambda_proj")])  # [B, S, H]
        heads, kv_heads, width, ratio = self.num_heads, self.num_kv_heads, self.head_dim, self.noise_ratio
        gates = self.onnx_gates(g, x)
        if g.low_bit or width % GROUP_QUERY_MULTIPLE or self.sliding_window or not self.rope:
            sizes = Heads(heads, kv_heads, width, ratio)
            return self.onnx_attention(g, x, g.cast(weight, "float32"), past, sizes, gates=gates)
        if gates is not None:
            weight = g.op("Mul", [weight, g.cast(gates, g.dtype)])
            gates = self._onnx_softmax_gates(g, gates)
        sizes = Heads(heads + heads // ratio, kv_heads, width)
        out, present = self.onnx_attention(g, x, None, past, sizes, gates=gates)
        if ratio > 1:
            groups = g.op("Reshape", [out, g.const([0, 0, heads // ratio, ratio + 1, width])])
            signal, noise = g.ops("Split", [groups, g.const([ratio, 1])], 2, axis=3)  # [B, S, H/R, R, d], [.., 1, d]
            noise = g.op("Mul", [noise, g.op("Reshape", [weight, g.const([0, 0, heads // ratio, ratio, 1])])])
            return g.op("Reshape", [g.op("Sub", [signal, noise]), g.const([0, 0, heads * width])]), present
        pairs = g.op("Reshape", [out, g.const([0, 0, heads, 2 * width])])
        signal, noise = g.ops("Split", [pairs], 2, axis=-1, num_outputs=2)  # [B, S, H, d]
        noise = g.op("Mul", [noise, g.op("Unsqueeze", [weight, g.const([-1])])])
        return g.op("Reshape", [g.op("Sub", [signal, noise]), g.const([0, 0, heads * width])]), present

    def _onnx_softmax_gates(self, g: Graph, gates: Value) -> Value:
        """Add the gates of all softmaxes, [B, S, H + H/R]: those of the signal heads, and 1 for each noise head that a
        signal head needs, else 0."""
        groups = g.op("Reshape", [gates, g.const([0, 0, self.num_heads // self.noise_ratio, self.noise_ratio])])
        largest = g.op("ReduceMax", [g.op("Abs", [groups]), g.const([-1])], keepdims=1)
        zero, one = (g.const(value, "float32") for value in (0, 1))
        needed = g.op("Where", [g.op("Equal", [largest, zero]), zero, one])
        return g.op("Reshape", [g.op("Concat", [groups, needed], axis=-1), g.const([0, 0, -1])])
