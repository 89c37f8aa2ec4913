"""Low-bit attention in torch: the logits, the products q k^T, and the KV cache, as a scheme's `attention` has them.

Logits at b bits, as in the Differential Transformer paper's Figure 8 (arXiv 2410.05258, section 3.7). Dynamic absmax:
each query row of each head has its own scale, found when it is computed, from the keys that the query may see.
Symmetric integers:

    s = max_valid |x| / (2^(b-1) - 1)        x_q = round(x / s) * s

A softmax forgives a common shift but not a coarse step: a row whose largest logit is 300 has a step of 43 at 4 bits,
one whose largest is 30 a step of 4.3. That is what low outliers buy.

Keys, values and integer products are those of ops/kv_cache.py. Here the cache holds what it is given, and what a device
would have rounded when it came is rounded anew at each call: the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models.softmax import Arithmetic
from ..ops import kv_cache
from .scheme import AttentionScheme


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


class LowBitAttention(Arithmetic):
    """Keys, values and products as `scheme` has them."""

    def __init__(self, scheme: AttentionScheme) -> None:
        self.scheme = scheme

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        scheme, format = self.scheme, self.scheme.key_format
        shared = query.shape[1] // key.shape[1]
        query = query.float() * scale
        if format == "float":
            return query @ _repeated(key.float(), shared).transpose(-1, -2)
        if format == "int8":
            codes, steps = kv_cache.round_rows(key)
            if scheme.query_bits:
                return kv_cache.row_scores(query, _repeated(codes, shared), _repeated(steps, shared), scheme.query_bits)
            return query @ _repeated(codes * steps[..., None], shared).transpose(-1, -2)
        recent = query @ _repeated(key.half().float(), shared).transpose(-1, -2)
        count = kv_cache.settled(key.shape[2], scheme.window)
        if not count:
            return recent
        codes, grids = kv_cache.round_keys(key[:, :, :count], kv_cache.BITS[format])
        if scheme.query_bits:
            low = kv_cache.grid_scores(query, _repeated(codes, shared), _repeated(grids, shared), scheme.query_bits)
        else:
            low = query @ _repeated(kv_cache.restore_keys(codes, grids), shared).transpose(-1, -2)
        old = self._old(query.shape[2], key.shape[2], query.device)[:, :count]
        return torch.cat((torch.where(old, low, recent[..., :count]), recent[..., count:]), -1)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        format = self.scheme.value_format
        shared = probabilities.shape[1] // value.shape[1]
        if format == "float":
            return probabilities @ _repeated(value.float(), shared)
        rows = value.unflatten(-1, (-1, head_dim))  # a value of diff_v1 is two rows of the cache
        if format == "int8":
            codes, steps = kv_cache.round_rows(rows)
            return probabilities @ _repeated((codes * steps[..., None]).flatten(-2), shared)
        length, total = probabilities.shape[-2:]
        old = self._old(length, total, value.device)
        count = kv_cache.settled(total, self.scheme.window)
        low = kv_cache.restore_values(*kv_cache.round_values(rows[:, :, :count], kv_cache.BITS[format])).flatten(-2)
        recent = probabilities.masked_fill(old, 0) @ _repeated(value.half().float(), shared)
        return recent + (probabilities * old)[..., :count] @ _repeated(low, shared)

    def _old(self, length: int, total: int, device: torch.device) -> Tensor:
        """Of the last `length` of `total` tokens, which keys were low-bit when it was the last: bool [S, T]."""
        ends = [kv_cache.settled(end, self.scheme.window) for end in range(total - length + 1, total + 1)]
        return torch.arange(total, device=device) < torch.tensor(ends, device=device)[:, None]


def _repeated(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def set_attention(model: nn.Module, scheme: AttentionScheme) -> None:
    """Put a scheme's attention in force in every attention layer of a decoder or block."""
    for module in model.modules():
        if hasattr(module, "logits_hook"):
            layer: Any = module  # an attention variant
            if scheme.logits is not None:
                layer.logits_hook = logits_hook(scheme.logits)
            if scheme.key_format != "float" or scheme.value_format != "float":
                layer.arithmetic = LowBitAttention(scheme)
