"""Canonical names of a model's tensors, and what they say."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoder import Decoder

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@cache
def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every parameter, in the model's order."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}


def linear_of(name: str) -> str:
    """The linear layer a tensor or a part of one belongs to: "a.q_proj" of "a.q_proj.weight", ".codes", ".scale"..."""
    for index, part in enumerate(parts := name.split(".")):
        if part.endswith("_proj") or part in ("embed_tokens", "lm_head"):
            return ".".join(parts[: index + 1])
    return name


def is_linear(name: str) -> bool:
    """Is this parameter the weight of a linear layer? Their names end in _proj, the head apart."""
    return name.endswith("_proj.weight") or name == HEAD


def layer_of(name: str) -> int | None:
    """The decoder layer of a tensor's name, None for what lies outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and len(parts) > 3 and parts[2].isdigit() else None


def reorder(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Put rows into `order`. What has another number of rows (a scale that all rows share) stays as it is."""
    if order is None or tensor.dim() == 0 or tensor.shape[0] != len(order):
        return tensor
    return tensor[order]


def stays_float32(name: str) -> bool:
    """Is a parameter float32 in a model of any dtype? What is neither a weight nor a bias is, such as lambda_q1."""
    return not name.endswith((".weight", ".bias"))
