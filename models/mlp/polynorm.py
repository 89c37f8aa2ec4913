"""PolyNorm (arXiv 2411.03884) as the gate, of the Motif models:

    act(z) = w0 N(z^3) + w1 N(z^2) + w2 N(z) + b,    N(y) = y / sqrt(mean(y^2) + 1e-6)

with the mean over all channels and four parameters per layer. Channel scales do not pass through it, so gate_proj
cannot be folded; up_proj and down_proj can. Powers are float32, because z^3 overflows float16 for |z| > 40.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..graph import Graph, Value
from ..mixers._mixer import Place
from ._gated import GatedMLP, MLPOptions

EPS = 1e-6


@dataclass(frozen=True)
class Options(MLPOptions):
    elementwise = 15  # three powers, each squared, summed, divided, weighted and added

    def module(self, place: Place) -> PolyNorm:
        return PolyNorm(self, place)


class PolyNorm(GatedMLP):
    wide = True

    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        self.channels = options.intermediate_size
        self.act_fn = nn.ParameterDict({"weight": torch.full((3,), 1 / 3), "bias": torch.zeros(1)})

    def act(self, gate: Tensor) -> Tensor:
        z = gate.float()
        weight, out = self.act_fn["weight"].float(), self.act_fn["bias"].float()
        for factor, power in zip(weight, (z**3, z**2, z), strict=True):
            out = out + factor * power * (power.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return out.to(gate.dtype)

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        square = g.op("Mul", [gate, gate])
        powers = g.op("Mul", [square, gate]), square, gate
        weight = self.act_fn["weight"].detach().float().numpy()
        out = g.const(self.act_fn["bias"].detach().float().numpy(), np.float32)
        for i, (factor, power) in enumerate(zip(weight, powers, strict=True)):  # N and its factor are an RMSNorm
            filled = g.weight(f"act_fn.{i}.norm.weight", np.full(self.channels, factor, np.float32), np.float32)
            normed = g.op("SimplifiedLayerNormalization", [power, filled], axis=-1, epsilon=EPS, stash_type=1)
            out = g.op("Add", [normed, out])
        return out
