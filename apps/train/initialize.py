"""Initial weights: random, or from a trained model, also with sub-norms added.

Linear layers and embeddings are N(0, 2 / (5 hidden)) (SmallInit, arXiv 1910.05895): a standard deviation of 0.02 at a
hidden size of 1000, larger in the small models here. Layers that write to the residual stream (o_proj, down_proj) are
divided by sqrt(2 layers), so the stream's variance does not grow with depth (GPT-2). Norm weights are 1. The
lambda vectors of differential attention version 1 are N(0, 0.1^2) (arXiv 2410.05258).

Each tensor has its own generator, seeded by (seed, name): two models with tensors of the same names and shapes,
such as the matched pair softmax and diff_v1, start from the same weights.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor, nn

from ...formats import QTensor
from ...models import Checkpoint, Decoder
from ...models.checkpoint import EMBEDDING, is_linear, shapes
from ...models.layers import RMSNorm
from ...quantize import Weights


def initialize(model: Decoder, seed: int, o_proj: float = 1.0, lambda_bias: float = 0.0) -> None:
    """Fill every parameter of `model` in place, with the same values on every device. o_proj: factor of its weights.
    lambda_bias: value of diff_v2's bias of lambda, in a model that has one."""
    config = model.config
    std = (2 / (5 * config.hidden_size)) ** 0.5
    into_residual = std / (2 * config.num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.rpartition(".")[2].startswith("lambda_") and parameter.ndim == 1:
                drawn *= 0.1
            elif name.endswith("norm.weight"):
                drawn.fill_(1.0)
            elif name.endswith("lambda_proj.bias"):
                drawn.fill_(lambda_bias)
            elif parameter.ndim == 1 or not (is_linear(name) or name == EMBEDDING):
                continue  # keeps the initial value of its mixer or MLP
            else:
                drawn *= into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else std
                drawn *= o_proj if name.endswith("o_proj.weight") else 1.0
            parameter.copy_(drawn)


def load_start(checkpoint: str) -> tuple[Decoder, dict[str, QTensor]]:
    """Load the model of a checkpoint in float, and the quantized weights of its linear layers, if it has any, by
    module."""
    weights = Weights(Checkpoint(checkpoint))
    with torch.device("meta"):
        model = Decoder(weights.checkpoint.config)
    quantized, floats = {}, {}
    for name in shapes(model.config):
        weight = weights.read(name)
        floats[name] = weight.dequantize() if isinstance(weight, QTensor) else weight.float()
        if isinstance(weight, QTensor) and is_linear(name):
            quantized[name.removesuffix(".weight")] = weight
    model.load_state_dict(floats, assign=True)
    return model, quantized


@torch.no_grad()
def insert_sub_norms(source: Decoder, model: Decoder, ids: Tensor) -> None:
    """Fill `model`, which has sub-norms (before o_proj and down_proj), from `source`, which has none. The norms'
    weights are fitted on the tokens `ids` [B, S].

    A norm divides the activations x_t of a token by r_t = sqrt(mean(x_t^2) + eps), which the trained model does not do.
    The least-squares weight of channel c that undoes this over all tokens is

        w_c = sum_t x_tc^2 / r_t  /  sum_t x_tc^2 / r_t^2        argmin sum_t (w_c x_tc / r_t - x_tc)^2

    If all tokens have the same r, w_c = r. After diff_v1's own head norm, w_c = 1 and nothing changes.
    """
    model.load_state_dict(source.state_dict(), strict=False)
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: object, name: str, eps: float) -> None:
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
        weight = torch.where(below > 0, above / below, above.sum() / below.sum())  # the latter: a channel of zeros
        model.get_parameter(f"{name}.weight").copy_(weight)
