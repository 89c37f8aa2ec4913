"""The learned weight of DIFF version 1's head norm, `subln.weight` in the official code (microsoft/unilm).

    o_i = (1 - lambda_init) * gain * RMSNorm((A1 - lambda A2) v)          gain [2d], shared by the heads of a layer

In a new model, averages of values are small, and the norm scales them to unit size, so untrained attention dominates
the embeddings in the residual stream. A gain that starts at 0.1 lets attention grow as it becomes useful. The gain
exists only in training: Hugging Face's diffllama has no such tensor, so checkpoints store the projection with the gain
folded into it, W_o[:, h, c] gain[c].
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models import Decoder
from ...models.attention import Differential


class GainedLinear(nn.Linear):
    """y = W (gain * x) + b, x [..., H * 2d] -> [..., N]: o_proj including the weight of the norm before it."""

    def __init__(self, linear: nn.Linear, width: int, gain: float) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.bias = linear.weight, linear.bias
        self.gain = nn.Parameter(torch.full((width,), gain, device=linear.weight.device))

    def product(self) -> Tensor:
        """Return the weight multiplied by the gain, [N, H * 2d]."""
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
    """Return a model with the gains folded into o_proj that shares all other parameters; `model` if it has no gains."""
    if not any(isinstance(part, GainedLinear) for part in model.modules()):
        return model
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for part in copied.modules():
        if isinstance(part, Differential) and isinstance(part.o_proj, GainedLinear):
            linear = nn.Linear(part.o_proj.in_features, part.o_proj.out_features, bias=False, device="meta")
            linear.weight, linear.bias = nn.Parameter(part.o_proj.product().detach()), part.o_proj.bias
            part.o_proj = linear
    return copied
