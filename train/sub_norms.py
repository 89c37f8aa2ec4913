"""Norms before o_proj and down_proj, put into a trained model that has none, so that ternary layers can follow them.

A norm divides a token's numbers x_t by their r_t = sqrt(mean(x_t^2) + eps), which the trained model does not do. What a
weight per channel can undo of it, in the least squares over the tokens of some text, is

    w_c = sum_t x_tc^2 / r_t  /  sum_t x_tc^2 / r_t^2        argmin sum_t (w_c x_tc / r_t - x_tc)^2

which is r where all tokens have the same r: behind diff_v1's own norm of its heads, 1, and nothing changes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import Decoder
from ..models.layers.norm import RMSNorm


@torch.no_grad()
def insert(source: Decoder, model: Decoder, ids: Tensor) -> None:
    """Fill `model`, which has sub-norms, from `source`, which has none; ids [B, S], text that flows through it."""
    model.load_state_dict(source.state_dict(), strict=False)
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Any, name: str, eps: float) -> None:
        x = inputs[0].flatten(0, -2).double()
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        above, below = (x.square() * inverse).sum(0), (x * inverse).square().sum(0)
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + above, before[1] + below

    norms = {name: norm for name, norm in model.named_modules() if name.endswith("_sub_norm")}
    for name, norm in norms.items():
        assert isinstance(norm, RMSNorm)
        source.get_submodule(name).register_forward_hook(partial(add, name=name, eps=norm.eps))
    for row in ids:
        source(row[None])
    for name, (above, below) in sums.items():
        weight = torch.where(below > 0, above / below, above.sum() / below.sum())  # of a channel that is always 0
        model.get_parameter(f"{name}.weight").copy_(weight)
