"""SwiGLU (arXiv 2002.05202, eq. 6): act(z) = silu(z) = z sigmoid(z)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..graph import Graph, Value
from ..mixers import Place
from ._gated import GatedMLP, MLPOptions


@dataclass(frozen=True)
class Options(MLPOptions):
    elementwise = 3

    def module(self, place: Place) -> SwiGLU:
        return SwiGLU(self, place)


class SwiGLU(GatedMLP):
    def act(self, gate: Tensor) -> Tensor:
        return F.silu(gate)

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        return g.op("Mul", [gate, g.op("Sigmoid", [gate])])
