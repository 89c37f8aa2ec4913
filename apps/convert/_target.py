"""What a target of `diffbit convert` is: a class whose fields are its options, each None where it is not given.

write.py lists the targets, and writes what they make of a model.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...io.errors import DiffbitError
from ...models import Checkpoint, ModelConfig


class Target(Protocol):
    def config(self, source: Checkpoint) -> ModelConfig:
        """Return the new model's config; raises DiffbitError for a model that cannot be converted."""

    def layer(self, source: Checkpoint, config: ModelConfig, index: int, tensors: dict[str, Tensor]) -> None:
        """Change a layer's tensors to those of the new model, in place. config: the new model's."""


def float_model(source: Checkpoint) -> None:
    """Raise DiffbitError if the model is quantized."""
    if source.quantization is not None:
        raise DiffbitError(f"{source.path}: is quantized; convert the float model, then quantize the result")


def checked(source: Checkpoint, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor as `dtype` (None: as it is); raises DiffbitError if that makes a number infinite."""
    converted = tensor if dtype is None else tensor.to(dtype)
    low, high = torch.aminmax(converted)
    if torch.isinf(low) or torch.isinf(high):
        label = str(converted.dtype).removeprefix("torch.")
        raise DiffbitError(
            f"{source.path}: tensor {name} has numbers beyond {torch.finfo(converted.dtype).max:g}, the largest of "
            f"{label}, in the new model; use --dtype float32"
        )
    return converted
