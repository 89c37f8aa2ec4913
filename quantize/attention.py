"""Low-bit attention in torch: the logits, the products q k^T, and the KV cache, as a scheme's `attention` has them.

Logits at b bits, as in the Differential Transformer paper's Figure 8 (arXiv 2410.05258, section 3.7). Dynamic absmax:
each query row of each head has its own scale, found when it is computed, from the keys that the query may see.
Symmetric integers:

    s = max_valid |x| / (2^(b-1) - 1)        x_q = round(x / s) * s

A softmax forgives a common shift but not a coarse scale: a row whose largest logit is 300 has a scale of 43 at 4 bits,
one whose largest is 30 a scale of 4.3. That is what low outliers buy.

Rounded logits are for comparisons in torch: no artifact has them.

Keys, values and integer products are those of ops/diff_attention.py. Here the cache holds what it is given, and what a
device would have quantized when it came is quantized anew at each call: the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..models.layers.attention import Attention
from ..models.layers.softmax import Arithmetic
from ..ops.diff_attention_reference import cached, mixed, scores
from ..ops.kv_cache import BLOCK
from .scheme import AttentionScheme


def quantize_logits(logits: Tensor, valid: Tensor, bits: int) -> Tensor:
    """Logits [B, heads, S, T] rounded to `bits` bits per row; valid: bool, broadcastable to it, the places that count.

    Places that are not valid come back clipped to the row's range; they are masked afterwards.
    """
    top = 2 ** (bits - 1) - 1
    largest = logits.abs().masked_fill(~valid, 0).amax(-1, keepdim=True)  # [B, heads, S, 1]
    scale = (largest / top).masked_fill(largest == 0, 1)  # a row of zeros, or that sees nothing, stays as it is
    return (logits / scale).round().clamp(-top, top) * scale


def logits_hook(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`quantize_logits` at `bits` bits as the `logits_hook` of an attention module."""
    return partial(quantize_logits, bits=bits)


class LowBitAttention(Arithmetic):
    """Keys, values and products as `scheme` has them: the reference of the operator that computes them on a device."""

    def __init__(self, scheme: AttentionScheme) -> None:
        self.scheme = scheme

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        scheme = self.scheme
        keys = cached(key.float(), query.shape[2], scheme.key_format, scheme.window, BLOCK)
        queries = (query.float() * scale).unflatten(1, (key.shape[1], -1))  # [B, G, r, S, d]
        return scores(queries, keys, scheme.query_bits).flatten(1, 2)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        scheme, groups = self.scheme, value.shape[1]
        rows = value.float().unflatten(-1, (-1, head_dim)).transpose(2, 3)  # [B, G, w, T, d]
        values = cached(rows.flatten(1, 2), probabilities.shape[2], scheme.value_format, scheme.window, 1)
        shares = probabilities.unflatten(1, (groups, -1))  # [B, G, r, S, T]
        return mixed(shares, values.grouped(groups, rows.shape[2])).flatten(4).flatten(1, 2)


def set_attention(model: nn.Module, scheme: AttentionScheme) -> None:
    """Put a scheme's attention in force in every attention layer of a decoder or block."""
    for module in model.modules():
        if isinstance(module, Attention):
            if scheme.logits is not None:
                module.logits_hook = logits_hook(scheme.logits)
            if scheme.key_format != "float" or scheme.value_format != "float":
                module.arithmetic = LowBitAttention(scheme)
