"""Softmax attention, each head gated (arXiv 2505.06708): o_h = sigmoid(w_h x) softmax(q_h k_g^T / sqrt d) v_g."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from diffbit.models.attention import softmax
from diffbit.models.mixers import Cache, Carried, Graph, Place, Rope, State, Value


@dataclass(frozen=True)
class Options(softmax.Options):
    def module(self, place: Place) -> Gated:
        return Gated(self, place)


class Gated(softmax.Softmax):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        self.gate_proj = nn.Linear(place.hidden_size, options.num_heads, bias=False)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        output = super().heads(x, rope, mask, state, carried).unflatten(-1, (self.num_heads, -1))
        return (output * self.gate_proj(x).sigmoid()[..., None]).flatten(2)

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        output, present = super().onnx_heads(g, x, past)
        gate = g.op("Unsqueeze", [g.op("Sigmoid", [g.linear(x, self.gate_proj, "gate_proj")]), g.const([-1])])
        output = g.op("Reshape", [output, g.const([0, 0, self.num_heads, self.head_dim])])
        return g.op("Reshape", [g.op("Mul", [output, gate]), g.const([0, 0, self.num_heads * self.head_dim])]), present
