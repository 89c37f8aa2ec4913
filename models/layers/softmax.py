"""softmax(q k^T * scale) v over a mask, twice: through torch's fused kernels, and step by step.

Every attention variant is a composition of `attend`. The explicit form exists for low-bit attention and for outlier
statistics: an `Arithmetic` computes the logits and the product with the values, and a hook sees the scaled logits, and
what it returns takes their place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .masks import full_causal
from .state import State

KERNEL_DEVICES: tuple[str, ...] = ()  # "cuda" joins once benchmarks/gpu.py finds it faster than torch's own attention
"""Where a pair's two branches are one call of triton_attention.py; elsewhere, each is a call of `attend`."""

FLASH_WIDEST = 256  # of a head, in torch's flash attention

LogitsHook = Callable[[Tensor, Tensor], Tensor]
"""(scaled logits fp32 [B, heads, S, T] before masking, mask of valid places broadcastable to it) -> logits."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """query [B, H, S, d], key [B, G, T, d], value [B, G, T, e] -> [B, H, S, e]; query head h reads head h // (H/G).

    mask as `causal_mask` makes it. A value wider than the key (e > d) leaves torch's CPU kernels no fused path, so
    query and key are padded with zeros to width e: measured on a 2-core AVX2 machine, forward plus backward, this is
    the fastest of two wide unfused calls, two calls per half of the value, and padding, from 512 tokens on (166 ms
    against 213 and 187 for 4 x 512 tokens, 8 heads of 32), and within 25 % of the fastest below. A single query
    (decoding) would pad the whole cache, so it goes unpadded.

    On a GPU torch's flash attention takes 16 bits and grouped heads, but no mask and no value wider than its key;
    padding costs as many products as two calls per half of the value, and half of the exponentials. What it does not
    take goes to memory-efficient attention (see `ungrouped`).
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
    """Key and value with a head for each of query's, as torch's memory-efficient attention wants them, which takes
    float32, masks and values of any width; without it torch would hold all [S, T] scores on a GPU."""
    shared = query.shape[1] // key.shape[1]
    return (key, value) if shared == 1 else (key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))


def in_one_kernel(query: Tensor, mask: Tensor | None, state: State | None) -> bool:
    """Whether triton_attention.py computes both branches: query [B, 2H, S, d], all tokens at once and none hidden."""
    if query.device.type not in KERNEL_DEVICES or mask is not None or state is not None:
        return False
    from .triton_attention import takes

    return takes(query)


class Arithmetic:
    """The two products of the explicit form, in float32; quantize/attention.py has them in low bits."""

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        """Scaled logits: query [B, H, S, d], key [B, G, T, d] -> [B, H, S, T]; branch 1 is the noise."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return (query.float() @ key.float().transpose(-1, -2)) * scale

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        """Probabilities [B, H, S, T], values [B, G, T, e] -> [B, H, S, e]; a value is cached in rows of head_dim."""
        return probabilities @ value.float().repeat_interleave(probabilities.shape[1] // value.shape[1], dim=1)


def explicit_softmax(logits: Tensor, mask: Tensor | None, hook: LogitsHook | None) -> Tensor:
    """Probabilities in float32 of logits [B, H, S, T] that have passed through the hook; 0 where the mask hides."""
    if mask is None:
        length, total = logits.shape[-2:]
        mask = full_causal(length, total, logits.device)
    if hook is not None:
        logits = hook(logits, mask).float()
    hidden = ~mask
    probabilities = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1)
    return probabilities.masked_fill(hidden, 0.0)  # a query that sees nothing: zeros, not a uniform spread
