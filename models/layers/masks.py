"""Attention masks: a boolean mask [B, 1, S, T] of the keys that a query may see, or None for plain causality.

T = past + S; query s is at position past + s and sees keys 0..past+s that the attention mask does not hide. A query
that sees nothing (padding on the left) gets zeros from every attention function here, never NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(
    length: int,
    past: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Return the mask of `length` = S new queries after `past` cached keys; True: the query sees the key.

    attention_mask: [B, T], 1 = real token, 0 = padding, in any arrangement. Without one the result is None when the
    fused kernels need no mask (no past, or a single query) and [1, 1, S, T] otherwise.
    """
    total = past + length
    if attention_mask is None:
        return None if past == 0 or length == 1 else full_causal(length, total, device)
    if attention_mask.dim() != 2 or attention_mask.shape[1] != total:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, wanted [batch, {total}]")
    return full_causal(length, total, attention_mask.device) & attention_mask.bool()[:, None, None, :]


def within(
    mask: Tensor | None, length: int, total: int, window: int, device: torch.device | str | None
) -> Tensor | None:
    """Limit a mask of `causal_mask` to the last `window` keys of each query, its own included; 0: no limit."""
    if not 0 < window < total:
        return mask
    seen = full_causal(length, total, device) if mask is None else mask
    return seen & torch.ones(length, total, dtype=torch.bool, device=device).triu(total - length - window + 1)


def full_causal(length: int, total: int, device: torch.device | str | None = None) -> Tensor:
    """Return the plain causal mask [1, 1, length, total] of the last `length` of `total` positions."""
    return torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)[None, None]


def default_positions(
    batch: int, length: int, past: int, attention_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Return positions [B, S]: with an attention mask [B, T], counted over real tokens only; else past, past+1, ..."""
    if attention_mask is None:
        return torch.arange(past, past + length, device=device).expand(batch, length)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


def real_tokens(mask: Tensor | None, length: int) -> Tensor | None:
    """Return bool [B, S], the last `length` = S tokens that a mask [B, 1, S, T] does not hide; None: it hides none.

    For mixers without attention weights, whose state padding must not change.
    """
    if mask is None:
        return None
    return mask[:, 0].diagonal(mask.shape[-1] - length, 1, 2)  # a query sees itself unless it is padding
