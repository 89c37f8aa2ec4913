"""GEGLU (arXiv 2002.05202, eq. 6): act(z) = gelu(z) = z / 2 (1 + erf(z / sqrt 2))."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..graph import Graph, Value
from ..layers.mlp import GatedMLP, MLPOptions
from ..mixer import Place


@dataclass(frozen=True)
class Options(MLPOptions):
    elementwise = 4

    def module(self, place: Place) -> GEGLU:
        return GEGLU(self, place)


class GEGLU(GatedMLP):
    def act(self, gate: Tensor) -> Tensor:
        return F.gelu(gate)

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        return g.op("Gelu", [gate])
