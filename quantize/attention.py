"""Attention logits at b bits, as in the Differential Transformer paper's Figure 8 (arXiv 2410.05258, section 3.7).

Dynamic absmax: each query row of each head has its own scale, found when it is computed, from the keys that the query
may see. Symmetric integers:

    s = max_valid |x| / (2^(b-1) - 1)        x_q = round(x / s) * s

A softmax forgives a common shift but not a coarse step: a row whose largest logit is 300 has a step of 43 at 4 bits,
one whose largest is 30 a step of 4.3. That is what low outliers buy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def quantize_logits(logits: Tensor, valid: Tensor, bits: int) -> Tensor:
    """Logits [B, heads, S, T] rounded to `bits` bits per row; valid: bool, broadcastable to it, the places that count.

    Places that are not valid come back clipped to the row's range; they are masked afterwards.
    """
    levels = 2 ** (bits - 1) - 1
    largest = logits.abs().masked_fill(~valid, 0).amax(-1, keepdim=True)  # [B, heads, S, 1]
    step = (largest / levels).masked_fill(largest == 0, 1)  # a row of zeros, or that sees nothing, stays as it is
    return (logits / step).round().clamp(-levels, levels) * step


def logits_hook(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`quantize_logits` at `bits` bits as the `logits_hook` of an attention module."""

    def hook(logits: Tensor, valid: Tensor) -> Tensor:
        return quantize_logits(logits, valid, bits)

    return hook


def set_logits_hook(model: nn.Module, bits: int) -> None:
    """Quantize the logits of every attention layer of a decoder or block."""
    hook = logits_hook(bits)
    for module in model.modules():
        if hasattr(module, "logits_hook"):
            layer: Any = module  # an attention variant
            layer.logits_hook = hook
