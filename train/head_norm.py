"""The learned weight of DIFF version 1's head norm, which the official code has as `subln.weight` (microsoft/unilm).

    o_i = (1 - lambda_init) * gain * RMSNorm((A1 - lambda A2) v)          gain [2d], shared by the heads of a layer

In a new model, averages of values are small, and the norm scales them to unit size, so untrained attention dominates
the embeddings in the residual stream. A gain that starts at 0.1 lets attention grow as it becomes useful. It exists
only in training: Hugging Face's diffllama has no such tensor, and a weight between a norm and a projection can be
folded into the projection, W_o[:, h, c] gain[c], which checkpoints store.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import Decoder
from ..models.layers.attention import Differential


class GainedLinear(nn.Linear):
    """y = W (gain * x) + b, x [..., H * 2d] -> [..., N]: o_proj with the weight of the norm before it."""

    def __init__(self, linear: nn.Linear, width: int, gain: float) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.bias = linear.weight, linear.bias
        self.gain = nn.Parameter(torch.full((width,), gain, device=linear.weight.device))

    def product(self) -> Tensor:
        """The weight with the gain in it, [N, H * 2d]."""
        return self.weight * self.gain.repeat(self.in_features // len(self.gain))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.product(), self.bias)


def add_gains(model: Decoder, gain: float) -> None:
    """Give every head norm of the model a learned weight, in place."""
    for part in model.modules():
        if isinstance(part, Differential) and part.norm_eps:
            assert isinstance(part.o_proj, nn.Linear)
            part.o_proj = GainedLinear(part.o_proj, part.o_proj.in_features // part.num_heads, gain)


def folded(model: Decoder) -> Decoder:
    """Return the model with its gains folded into o_proj, sharing all other parameters; itself if it has no gains."""
    if not any(isinstance(part, GainedLinear) for part in model.modules()):
        return model
    found = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for part in found.modules():
        if isinstance(part, Differential) and isinstance(part.o_proj, GainedLinear):
            linear = nn.Linear(part.o_proj.in_features, part.o_proj.out_features, bias=False, device="meta")
            linear.weight, linear.bias = nn.Parameter(part.o_proj.product().detach()), part.o_proj.bias
            part.o_proj = linear
    return found
