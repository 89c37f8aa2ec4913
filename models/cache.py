"""The key-value cache: one pair of buffers per layer, allocated once and appended in place.

Keys are stored rotated. A buffer is [B, Hk, C, d]: Hk heads of width d (diff_v1 stores a 2d-wide value as two
neighbouring heads, so that keys and values have one shape), C the capacity in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DiffbitError
from .attention import variant
from .config import ModelConfig


class LayerCache:
    """Keys and values [B, Hk, C, d] of one layer, the first `length` tokens of which are filled."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value
        self.length = 0

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


class KVCache:
    """`layers[i]` is layer i's cache; `length` tokens are stored of at most `capacity`."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        heads = variant(config.attention).Attention.cache_heads(config)
        shape = (batch, heads, capacity, config.head_dim)
        self.capacity = capacity
        self.layers = [
            LayerCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]

    @property
    def length(self) -> int:
        return self.layers[0].length

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        for layer in self.layers:
            layer.length = 0
