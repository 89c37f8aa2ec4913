"""A layer's state between calls, in torch. Each mixer makes its own (models/mixers/_mixer.py, `state`).

A state is an object with `reset()`, which forgets every token. Attention's is a LayerCache, a pair of buffers
[B, Hk, C, d], allocated once and appended in place: Hk heads of width d (diff_v1 stores a 2d-wide value as two
neighbouring heads, so that keys and values have the same shape), and C tokens of capacity. Keys are stored rotated. A
recurrence has a FixedState.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...io.errors import DiffbitError

Carried = dict[int, tuple[Tensor, ...]]
"""Tensors that layers pass to later ones, by the index of the source layer (models/mixers/_mixer.py, `reads`)."""


class State(Protocol):
    def reset(self) -> None: ...


class FixedState:
    """Tensors fp32 [B, ...] whose sizes do not depend on the number of tokens, in the order of the mixer's buffers. A
    layer that gets everything about earlier tokens from another one has none."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def reset(self) -> None:
        self.tensors = tuple(map(torch.zeros_like, self.tensors))


class LayerCache:
    """Keys and values [B, Hk, C, d] of one layer, of which the first `length` tokens are filled."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value
        self.length = 0

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        """Allocate buffers of `shape` [B, Hk, C, d]."""
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [B, Hk, S, d]; return all stored ones, [B, Hk, length + S, d], in their dtype.

        The cache is for inference: no gradient flows through it.
        """
        end = self.length + key.shape[2]
        capacity = self.key.shape[2]
        if end > capacity:
            raise DiffbitError(
                f"the KV cache holds {capacity} tokens and {end} are needed; shorten the input or make a KVCache with "
                "a larger capacity"
            )
        self.key[:, :, self.length : end] = key.detach()
        self.value[:, :, self.length : end] = value.detach()
        self.length = end
        return self.key[:, :, :end].to(key.dtype), self.value[:, :, :end].to(value.dtype)

    def reset(self) -> None:
        """Forget every token; the buffers are kept."""
        self.length = 0
