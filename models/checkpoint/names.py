"""What a checkpoint must hold: names and shapes of every tensor, and the order of rows on disk against memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..attention import variant
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
    for index, piece in enumerate(pieces := name.split(".")):
        if piece.endswith("_proj") or piece in ("embed_tokens", "lm_head"):
            return ".".join(pieces[: index + 1])
    return name


def layer_of(name: str) -> int | None:
    """The decoder layer of a tensor's name, None for what lies outside the layers."""
    pieces = name.split(".")
    return int(pieces[2]) if name.startswith("model.layers.") and len(pieces) > 3 and pieces[2].isdigit() else None


@cache
def _orders(config: ModelConfig) -> dict[str, Tensor]:
    return variant(config.attention).Attention.row_order(config)


def row_order(config: ModelConfig, name: str) -> Tensor | None:
    """Rows of the tensor `name`: canonical = on disk[order]; None where they are the same."""
    linear = linear_of(name)
    return _orders(config).get(linear.rpartition(".")[2]) if layer_of(name) is not None else None


def reorder(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Put rows into `order`. What has another number of rows (a scale that all rows share) stays as it is."""
    if order is None or tensor.dim() == 0 or tensor.shape[0] != len(order):
        return tensor
    return tensor[order]


def stays_float32(name: str) -> bool:
    """Whether a parameter is float32 in a model of any dtype: diff_v1's lambda vectors."""
    return name.rpartition(".")[2].startswith("lambda_")
