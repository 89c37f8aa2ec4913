"""Low-bit caches of random rows, as DiffAttention takes them (diffbit/ops/kv_cache.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from diffbit.ops import kv_cache

WINDOW, FIRST = 32, 4  # recent and first tokens that stay float16


def low_bit_cache(rows: Tensor, bits: int, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the buffer, its scales and the float16 rows for keys or values [B, Hk, T, d], T >= 32; side: "key" or
    "value"."""
    rows = kv_cache.rotate(rows.float()).half()
    count = kv_cache.quantized_tokens(rows.shape[2], WINDOW)
    offset, low = rows[:, :, :0], rows[:, :, :count].float()
    if side == "key":
        offset = kv_cache.offset_of(rows).unsqueeze(2)
        low -= offset.float()
    codes, scale = kv_cache.encode_rows(low, bits)
    exact = torch.cat((rows[:, :, :FIRST], offset, rows[:, :, count:]), 2)
    free = WINDOW + kv_cache.BLOCK - (rows.shape[2] - count)
    return kv_cache.pack(codes, bits), scale, torch.nn.functional.pad(exact, (0, 0, 0, free))
