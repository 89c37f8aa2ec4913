"""What a layer keeps of the tokens so far, in torch. A mixer makes its own (models/mixer.py, `state`).

A state is an object with `reset()`, which forgets every token. Attention's is a LayerCache, a pair of buffers
[B, Hk, C, d], allocated once and appended in place: Hk heads of width d (diff_v1 stores a 2d-wide value as two
neighbouring heads, so that keys and values have one shape), C the capacity in tokens. Keys are stored rotated. A
recurrence keeps tensors of a fixed size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...errors import DiffbitError

Carried = dict[int, tuple[Tensor, ...]]
"""What layers hand to later ones on the way through a model, by the giving layer's index (models/mixer.py, `reads`)."""


class State(Protocol):
    def reset(self) -> None: ...


class NoState:
    """Of a mixer that keeps nothing: all that it knows of earlier tokens comes from another layer."""

    def reset(self) -> None:
        pass


class LayerCache:
    """Keys and values [B, Hk, C, d] of one layer, the first `length` tokens of which are filled."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value
        self.length = 0

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        """shape: [B, Hk, C, d]."""
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [B, Hk, S, d]; return all that is stored, [B, Hk, length + S, d], in their dtype.

        The cache is for inference: no gradient flows through what it holds.
        """
        end = self.length + key.shape[2]
        capacity = self.key.shape[2]
        if end > capacity:
            raise DiffbitError(
                f"the KV cache holds {capacity} tokens and {end} are needed: shorten the input or make a KVCache of a "
                "larger capacity"
            )
        self.key[:, :, self.length : end] = key.detach()
        self.value[:, :, self.length : end] = value.detach()
        self.length = end
        return self.key[:, :, :end].to(key.dtype), self.value[:, :, :end].to(value.dtype)

    def reset(self) -> None:
        """The buffers stay."""
        self.length = 0
