"""ReGLU (arXiv 2002.05202, eq. 6): act(z) = max(z, 0)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from . import GatedMLP, Graph, MLPOptions, Place, Value


@dataclass(frozen=True)
class Options(MLPOptions):
    elementwise = 1

    def module(self, place: Place) -> ReGLU:
        return ReGLU(self, place)


class ReGLU(GatedMLP):
    def act(self, gate: Tensor) -> Tensor:
        return F.relu(gate)

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        return g.op("Relu", [gate])
