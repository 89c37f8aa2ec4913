"""softmax(q k^T * scale) v with a mask, in two forms: torch's fused kernels, and explicitly.

Every attention variant is a composition of `attend`. The explicit form is for low-bit attention and for outlier
statistics: an `Arithmetic` computes the logits and the product with the values, and a hook can see and replace the
scaled logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .masks import full_causal

FLASH_WIDEST = 256  # largest head width of torch's flash attention

LogitsHook = Callable[[Tensor, Tensor], Tensor]
"""(scaled logits fp32 [B, heads, S, T] before masking, mask of valid places broadcastable to it) -> logits."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """query [B, H, S, d], key [B, G, T, d], value [B, G, T, e] -> [B, H, S, e]; query head h reads head h // (H/G).

    mask: from `causal_mask`. torch's CPU kernels have no fused path for a value wider than the key (e > d), so query
    and key are padded with zeros to width e. On a 2-core AVX2 machine, forward plus backward, padding is the fastest
    from 512 tokens on (166 ms for 4 x 512 tokens, 8 heads of 32; 213 ms for two wide unfused calls, 187 ms for two
    calls per half of the value), and within 25 % of the fastest below. For a single query (decoding), padding would
    copy the whole cache, so it is not padded.

    On a GPU torch's flash attention supports 16 bits and grouped heads, but no mask and no value wider than its key;
    padding costs as many products as two calls per half of the value, and half of the exponentials. Cases that it does
    not support use memory-efficient attention (see `ungrouped`).
    """
    length, total, extra = query.shape[2], key.shape[2], value.shape[-1] - key.shape[-1]
    if query.is_cuda and (query.dtype == torch.float32 or mask is not None or value.shape[-1] > FLASH_WIDEST):
        key, value = ungrouped(query, key, value)
    elif extra and length > 1:
        query, key = F.pad(query, (0, extra)), F.pad(key, (0, extra))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and length == total and length > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads for each query head, as torch's memory-efficient attention needs. It supports float32,
    masks and values of any width; without it torch would materialise all [S, T] scores on a GPU."""
    shared = query.shape[1] // key.shape[1]
    return (key, value) if shared == 1 else (key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))


class Arithmetic:
    """The two products of the explicit form, in float32; quantize/attention.py has low-bit ones."""

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        """Return scaled logits [B, H, S, T] of query [B, H, S, d] and key [B, G, T, d]; branch 1 is the noise."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return (query.float() @ key.float().transpose(-1, -2)) * scale

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        """Multiply probabilities [B, H, S, T] and values [B, G, T, e], cached in rows of head_dim -> [B, H, S, e]."""
        return probabilities @ value.float().repeat_interleave(probabilities.shape[1] // value.shape[1], dim=1)


def explicit_softmax(logits: Tensor, mask: Tensor | None, hook: LogitsHook | None) -> Tensor:
    """Apply the hook and softmax to logits [B, H, S, T]; returns float32 probabilities, 0 where the mask hides."""
    if mask is None:
        length, total = logits.shape[-2:]
        mask = full_causal(length, total, logits.device)
    if hook is not None:
        logits = hook(logits, mask).float()
    hidden = ~mask
    probabilities = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1)
    return probabilities.masked_fill(hidden, 0.0)  # a query that sees nothing gets zeros, not uniform probabilities
