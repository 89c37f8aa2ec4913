"""KAN (arXiv 2404.19756, eq. 2.10 to 2.12): two layers, E -> F -> E, each edge of which is a function of one channel.

    y_i = sum_j phi_ij(x_j),    phi_ij(x) = w_ij silu(x) + sum_n c_ijn B_n(x)

B_n: the cubic B-splines (order 3) of a grid of G intervals on [-R, R], G + 3 of them. On an equidistant grid of width
h = 2 R / G all are one function, with centres m_n = -R + (n - 1) h, n = 0 ... G + 2:

    B_n(x) = (max(2 - u, 0)^3 - 4 max(1 - u, 0)^3) / 6,    u = |x - m_n| / h

So a layer is a linear one, up_proj or down_proj, of E (G + 4) features: silu(x), B_0(x), B_1(x), ... It is quantized
like any other, and gptq gets the features. The grid is fixed (the paper moves it to the inputs): x is the output of a
norm, and a sub-norm, where there is one, norms the F hidden channels. Outside the grid only silu is left. At the same
intermediate_size it has (G + 4) 2/3 times as many weights as a gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....io.fields import Positive, bounds
from ....models.mlp import MLP, Graph, MLPOptions, Place, Value

ORDER = 3


@dataclass(frozen=True)
class Options(MLPOptions):
    """grid_size: G; grid_range: R."""

    grid_size: Annotated[int, bounds(1, 1 << 10)] = field(default=5, kw_only=True)
    grid_range: Positive = field(default=3.0, kw_only=True)

    scalable = False

    @property
    def features(self) -> int:
        """Functions of a channel."""
        return 1 + self.grid_size + ORDER

    def operations(self, hidden_size: int) -> int:
        """Count 13 operations for a spline and 3 for silu, of each input of both layers."""
        return (13 * (self.features - 1) + 3) * (hidden_size + self.intermediate_size)

    def module(self, place: Place) -> KAN:
        return KAN(self, place)


class KAN(MLP):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__()
        hidden, inner, features = place.hidden_size, options.intermediate_size, options.features
        self.width = 2 * options.grid_range / options.grid_size
        self.centres = [(n - 1) * self.width - options.grid_range for n in range(features - 1)]
        self.up_proj: nn.Module = nn.Linear(features * hidden, inner, bias=options.bias)
        self.ffn_sub_norm = place.sub_norm(inner)
        self.down_proj: nn.Module = nn.Linear(features * inner, hidden, bias=options.bias)

    def features(self, x: Tensor) -> Tensor:
        """x [B, S, E] -> [B, S, (G + 4) E]: silu of all channels, then B_0 of all, ..."""
        centres = torch.tensor(self.centres, dtype=x.dtype, device=x.device)[:, None]
        u = (x[..., None, :] - centres).abs() / self.width  # [B, S, G + 3, E]
        splines = (F.relu(2 - u) ** 3 - 4 * F.relu(1 - u) ** 3) / 6
        return torch.cat((F.silu(x), splines.flatten(-2)), -1)

    def onnx_features(self, g: Graph, x: Value) -> Value:
        """Add `features` as ONNX nodes."""

        def number(value: float) -> Value:
            return g.const(value, g.dtype)

        def cubed(edge: float, u: Value) -> Value:
            inside = g.op("Relu", [g.op("Sub", [number(edge), u])])
            return g.op("Mul", [g.op("Mul", [inside, inside]), inside])

        centres = g.const([[centre] for centre in self.centres], g.dtype)
        apart = g.op("Abs", [g.op("Sub", [g.op("Unsqueeze", [x, g.const([-2])]), centres])])
        u = g.op("Div", [apart, number(self.width)])
        inner = g.op("Mul", [cubed(1, u), number(4)])
        splines = g.op("Div", [g.op("Sub", [cubed(2, u), inner]), number(6)])
        splines = g.op("Reshape", [splines, g.const([0, 0, -1])])
        return g.op("Concat", [g.op("Mul", [x, g.op("Sigmoid", [x])]), splines], axis=-1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.ffn_sub_norm(self.up_proj(self.features(x)))
        return self.down_proj(self.features(hidden))

    def onnx(self, g: Graph, x: Value) -> Value:
        hidden = g.linear(self.onnx_features(g, x), self.up_proj, "up_proj")
        hidden = g.norm(hidden, self.ffn_sub_norm, "ffn_sub_norm")
        return g.linear(self.onnx_features(g, hidden), self.down_proj, "down_proj")
