"""Weights to start from.

Linear layers and embeddings: N(0, 2 / (5 hidden)), SmallInit (arXiv 1910.05895), which is 0.02 at a
hidden size of 1000 and larger in the small models here. What writes into the residual stream (o_proj, down_proj) is
divided by sqrt(2 layers), so that the stream's variance does not grow with depth (GPT-2). Norm weights are 1. The
lambda vectors of differential attention version 1 are N(0, 0.1^2) (arXiv 2410.05258).

Each tensor is drawn from a generator of its own, seeded by (seed, name): two models with tensors of the same name and
shape, as the matched pair softmax / diff_v1 has throughout, start from the same weights.
"""

from __future__ import annotations

import hashlib

import torch

from ..models import Decoder
from ..models.checkpoint.names import EMBEDDING, is_linear


def initialize(model: Decoder, seed: int) -> None:
    """Fill every parameter of `model`, in place; the same on every device."""
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
            elif parameter.ndim == 1 or not (is_linear(name) or name == EMBEDDING):
                continue  # what its mixer or MLP began it with
            else:
                drawn *= into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else std
            parameter.copy_(drawn)
