"""The cache of a torch model: a state for each layer, made by its mixer."""

from __future__ import annotations

import torch

from .config import ModelConfig


class KVCache:
    """`layers[i]` is layer i's state (layers/state.py); it stores `length` tokens of at most `capacity`."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers = [layer.mixer.state(batch, capacity, dtype, device) for layer in config.layers]

    def reset(self) -> None:
        """Forget every token."""
        self.length = 0
        for layer in self.layers:
            layer.reset()
