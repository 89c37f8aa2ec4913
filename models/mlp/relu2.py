"""Squared ReLU (arXiv 2109.08668) as the gate of BitNet b1.58 2B4T (2504.12285, section 2): act(z) = relu(z)^2.

relu(gate)^2 * up is cubic: it overflows float16 if both are 41, a few times as large as in a small model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..graph import Graph, Value
from ..mixers import Place
from ._gated import GatedMLP, MLPOptions


@dataclass(frozen=True)
class Options(MLPOptions):
    elementwise = 2

    def module(self, place: Place) -> SquaredReLU:
        return SquaredReLU(self, place)


class SquaredReLU(GatedMLP):
    wide = True

    def act(self, gate: Tensor) -> Tensor:
        return F.relu(gate).square()

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        positive = g.op("Relu", [gate])
        return g.op("Mul", [positive, positive])
