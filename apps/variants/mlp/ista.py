"""CRATE's sparsification, a step of ISTA (arXiv 2311.13110, ISTA block), which takes the place of a layer's MLP:

    x = relu(z + t (D^T (z - D z) - l)),    z = norm(x)

a step of proximal gradient descent, of size t = 0.1, on |z - D a|^2 / 2 + l |a|_1 with a >= 0, from a = z. It replaces
the residual stream, instead of adding to it (`residual`), and D is [E, E], whatever intermediate_size a model's other
MLPs would have. The other half of a layer is ../attention/crate.py.

up_proj is D. down_proj is another matrix than D^T here, as in the authors' later CRATE-alpha (2405.20299):
an operator multiplies by a low-bit weight in one orientation, and methods round a linear for its own input, so that a
rounded D would not be the transpose of a rounded D^T. A model with D^T as its down_proj computes the formula above.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

from ....io.errors import DiffbitError
from ....io.fields import NotNegative, Positive
from ....models.mlp import MLP, Graph, MLPOptions, Place, Value


@dataclass(frozen=True)
class Options(MLPOptions):
    """step: t; threshold: l."""

    step: Positive = field(default=0.1, kw_only=True)
    threshold: NotNegative = field(default=0.1, kw_only=True)

    scalable = False
    residual = False
    elementwise = 6

    @classmethod
    def of_size(cls, hidden_size: int, intermediate_size: int, bias: bool) -> Options:
        return cls(hidden_size, bias=bias)

    def module(self, place: Place) -> ISTA:
        if self.intermediate_size != place.hidden_size:
            raise DiffbitError(
                f"intermediate_size is {self.intermediate_size}, wanted {place.hidden_size}, the hidden size: ista's "
                "code takes the place of the residual stream"
            )
        return ISTA(self, place)


class ISTA(MLP):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__()
        size, bias = place.hidden_size, options.bias
        self.step, self.shift = options.step, options.step * options.threshold
        self.up_proj: nn.Module = nn.Linear(size, size, bias=bias)
        self.ffn_sub_norm = place.sub_norm(size)
        self.down_proj: nn.Module = nn.Linear(size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.down_proj(self.ffn_sub_norm(x - self.up_proj(x)))
        return F.relu(x + self.step * gradient - self.shift)

    def onnx(self, g: Graph, x: Value) -> Value:
        rest = g.norm(g.op("Sub", [x, g.linear(x, self.up_proj, "up_proj")]), self.ffn_sub_norm, "ffn_sub_norm")
        gradient = g.op("Mul", [g.linear(rest, self.down_proj, "down_proj"), g.const(self.step, g.dtype)])
        return g.op("Relu", [g.op("Sub", [g.op("Add", [x, gradient]), g.const(self.shift, g.dtype)])])
