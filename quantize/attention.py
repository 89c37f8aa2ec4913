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

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.layers.softmax import Arithmetic
from ..models.mixer import Attention
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
        shared, total = query.shape[1] // key.shape[1], key.shape[2]
        query = query.float() * scale
        if format in ("float", "fp16"):
            return query @ _repeated(_held(key, format), shared).transpose(-1, -2)
        if format == "int8":
            codes, steps = kv_cache.round_rows(key)
            if scheme.query_bits:
                return kv_cache.row_scores(query, _repeated(codes, shared), _repeated(steps, shared), scheme.query_bits)
            return query @ _repeated(codes * steps[..., None], shared).transpose(-1, -2)
        settled = kv_cache.settled(total, scheme.window)
        codes, grids = kv_cache.round_keys(key[:, :, :settled], kv_cache.BITS[format])
        low, recent = kv_cache.restore_keys(codes, grids), _repeated(key.half().float(), shared)
        codes, grids, low = (_repeated(x, shared) for x in (codes, grids, low))
        parts = []
        for run, count, end in self._runs(query.shape[2], total):
            rows, held = query[:, :, run], recent[:, :, count:end]
            if scheme.query_bits and count:
                blocks = count // kv_cache.GROUP
                old = kv_cache.grid_scores(
                    rows, codes[:, :, :count], grids[:, :, :blocks], scheme.query_bits, kv_cache.BITS[format]
                )
                scores = torch.cat((old, rows @ held.transpose(-1, -2)), -1)
            else:
                scores = rows @ torch.cat((low[:, :, :count], held), 2).transpose(-1, -2)
            parts.append(F.pad(scores, (0, total - end)))
        return torch.cat(parts, 2)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        format = self.scheme.value_format
        shared, (length, total) = probabilities.shape[1] // value.shape[1], probabilities.shape[-2:]
        if format in ("float", "fp16"):
            return probabilities @ _repeated(_held(value, format), shared)
        rows = value.unflatten(-1, (-1, head_dim))  # a value of diff_v1 is two rows of the cache
        if format == "int8":
            codes, steps = kv_cache.round_rows(rows)
            return probabilities @ _repeated((codes * steps[..., None]).flatten(-2), shared)
        settled = kv_cache.settled(total, self.scheme.window)
        grids = kv_cache.round_values(rows[:, :, :settled], kv_cache.BITS[format])
        low, recent = kv_cache.restore_values(*grids).flatten(-2), value.half().float()
        low, recent = _repeated(low, shared), _repeated(recent, shared)
        return torch.cat(
            [
                probabilities[:, :, run, :end] @ torch.cat((low[:, :, :count], recent[:, :, count:end]), 2)
                for run, count, end in self._runs(length, total)
            ],
            2,
        )

    def _runs(self, length: int, total: int) -> Iterator[tuple[slice, int, int]]:
        """The last `length` of `total` tokens in runs that see the same cache: (queries, low-bit keys, keys in all).

        Keys behind a run's last query are those that its mask hides anyway.
        """
        first = total - length
        for count, run in groupby(range(first + 1, total + 1), lambda end: kv_cache.settled(end, self.scheme.window)):
            held = list(run)
            yield slice(held[0] - 1 - first, held[-1] - first), count, held[-1]


def _held(x: Tensor, format: str) -> Tensor:
    return x.half().float() if format == "fp16" else x.float()


def _repeated(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def set_attention(model: nn.Module, scheme: AttentionScheme) -> None:
    """Put a scheme's attention in force in every attention layer of a decoder or block."""
    for module in model.modules():
        if isinstance(module, Attention):
            if scheme.logits is not None:
                module.logits_hook = logits_hook(scheme.logits)
            if scheme.key_format != "float" or scheme.value_format != "float":
                module.arithmetic = LowBitAttention(scheme)
