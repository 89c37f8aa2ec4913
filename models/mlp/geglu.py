"""GEGLU (arXiv 2002.05202, eq. 6) with GELU's approximation by tanh (arXiv 1606.08415, section 2), as Gemma has it:

act(z) = z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) = z sigmoid(2 sqrt(2 / pi) (z + 0.044715 z^3))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..graph import Graph, Value
from ..mixers._mixer import Place
from ._gated import GatedMLP, MLPOptions

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


@dataclass(frozen=True)
class Options(MLPOptions):
    elementwise = 7

    def module(self, place: Place) -> GEGLU:
        return GEGLU(self, place)


class GEGLU(GatedMLP):
    def act(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh")

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        # A gate above 255 in a float16 graph has an infinite square, of which the sigmoid is 1 or 0, as it should be
        linear, cubic = (g.const(number, g.dtype) for number in (LINEAR, CUBIC))
        slope = g.op("Add", [g.op("Mul", [g.op("Mul", [gate, gate]), cubic]), linear])
        return g.op("Mul", [gate, g.op("Sigmoid", [g.op("Mul", [slope, gate])])])
