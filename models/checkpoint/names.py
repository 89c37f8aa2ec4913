"""Canonical names of a model's tensors, and functions that interpret them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoder import Decoder

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # types of float tensors on disk


@cache
def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every parameter, in the model's order."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}


def linear_of(name: str) -> str:
    """Return the linear layer of a tensor or a part of it: "a.q_proj" for "a.q_proj.weight", "a.q_proj.codes", ..."""
    for index, part in enumerate(parts := name.split(".")):
        if part.endswith("_proj") or part in ("embed_tokens", "lm_head"):
            return ".".join(parts[: index + 1])
    return name


def is_linear(name: str) -> bool:
    """Whether this parameter is the weight of a linear layer: the head, or a layer whose name ends in _proj."""
    return name.endswith("_proj.weight") or name == HEAD


def layer_of(name: str) -> int | None:
    """Return the decoder layer of a tensor, or None if it is outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and len(parts) > 3 and parts[2].isdigit() else None


def reorder(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Put rows into `order`. A tensor with another number of rows (a scale shared by all rows) is unchanged."""
    if order is None or tensor.dim() == 0 or tensor.shape[0] != len(order):
        return tensor
    return tensor[order]


def stays_float32(name: str) -> bool:
    """Whether a parameter is float32 in a model of any dtype: all but weights and biases are, such as lambda_q1."""
    return not name.endswith((".weight", ".bias"))
