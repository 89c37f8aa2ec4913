"""SwiGLU (arXiv 2002.05202, eq. 6): act(z) = silu(z) = z sigmoid(z)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import silu_gate
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

    def onnx_gated(self, g: Graph, x: Value, linears: Mapping[str, nn.Module], raised: bool) -> Value:
        both = g.stacked_linears(x, linears)
        return super().onnx_gated(g, x, linears, raised) if both is None else g.custom(silu_gate, [both])

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        return g.op("Mul", [gate, g.op("Sigmoid", [gate])])
