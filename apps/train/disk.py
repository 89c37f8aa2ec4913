"""The disk space that a training run takes at its peak, from shapes alone.

checkpoint     the model in fp32, the optimizer's moments of what is trained, parameters that the model lacks
two of them    while one takes the place of the one before
at the end     the last checkpoint, and the trained model: in fp32, or quantized and its master weights
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...models import Decoder, num_parameters
from ...models.checkpoint import shapes
from ...quantize import resolve, sizes
from .config import TrainConfig

LOG_LINE = 300  # bytes
SMALL = 64 << 10  # bytes of configurations, tables and headers of a folder


def disk_demand(model: Decoder, config: TrainConfig, tokenizer: int = 0) -> int:
    """Return the bytes that a run writes at most at a time. tokenizer: bytes of its files, which each model has."""
    floats = 4 * num_parameters(model.config) + tokenizer + SMALL
    extra = sum(4 * part.numel() for name, part in model.named_parameters() if name not in shapes(model.config))
    moments = sum(_moments(part.numel(), config.optimizer) for part in model.parameters() if part.requires_grad)
    checkpoint = floats + extra + moments
    result = floats + extra
    if config.scheme is not None:
        result += sizes(resolve(model.config, config.scheme), stored=torch.float32).checkpoint_bytes + tokenizer + SMALL
    checkpoints = (config.steps - 1) // config.checkpoint_every if config.checkpoint_every else 0
    return max(min(checkpoints, 2) * checkpoint, min(checkpoints, 1) * checkpoint + result) + LOG_LINE * config.steps


def _moments(count: int, optimizer: str) -> int:
    """Return the bytes of AdamW's two moments of `count` parameters."""
    return 8 * count if optimizer == "adamw" or count < 4096 else 2 * count + 8 * -(-count // 256) + 2048


def present(out: Path) -> int:
    """Return the bytes of the run that is in a folder: it is deleted, or goes on, so that its space is free for the new
    one."""
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) if out.is_dir() else 0
