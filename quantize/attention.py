"""Low-bit attention in torch: logits, products q k^T, probabilities and the KV cache, as the scheme's `attention`
specifies.

Logits at b bits follow Figure 8 of the Differential Transformer paper (arXiv 2410.05258, section 3.7), with dynamic
absmax scales: each query row of each head has its own scale, computed from the logits of the keys that the query may
see. Symmetric integers:

    s = max_valid |x| / (2^(b-1) - 1)        x_q = round(x / s) * s

A softmax is invariant to a common shift but not to a coarse scale: at 4 bits, a row whose largest logit is 300 has a
scale of 43, one whose largest is 30 a scale of 4.3. This is why smaller outliers help.

Probabilities at b bits: each map that a softmax gives is rounded before it multiplies the values, in differential
attention the signal and the noise apart. Codes are unsigned, and each query row has the scale of its largest weight:

    s = max |p| / (2^b - 1)                  p_q = round(p / s) * s

That is what integer kernels have that compute exp(x - max) and divide by the sum at the end (SageAttention, arXiv
2410.02367). One scale of 1 / (2^b - 1) for all rows would round the weights of a long context to zero. Weights that a
variant has mixed across heads may be negative; they take a sign besides.

Rounded logits and probabilities exist only for comparisons in torch; artifacts do not support them.

Keys, values and integer products are those of ops/diff_attention.py. Here the cache holds float values, and each call
quantizes again what a device quantizes once, when a token is appended; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..models.attention import Attention
from ..models.layers.arithmetic import Arithmetic
from ..models.mixers import Mixer
from ..ops.diff_attention_reference import cached, mixed, scores
from ..ops.kv_cache import quantize_rows
from .scheme import AttentionScheme


def quantize_logits(logits: Tensor, valid: Tensor, bits: int) -> Tensor:
    """Round logits [B, heads, S, T] to `bits` bits per row; valid: bool, broadcastable, the positions that count.

    Positions that are not valid are clipped to the row's range; they are masked afterwards.
    """
    top = 2 ** (bits - 1) - 1
    largest = logits.abs().masked_fill(~valid, 0).amax(-1, keepdim=True)  # [B, heads, S, 1]
    scale = (largest / top).masked_fill(largest == 0, 1)  # leaves rows unchanged that are zero or fully masked
    return (logits / scale).round().clamp(-top, top) * scale


def logits_hook(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `quantize_logits` at `bits` bits, as the `logits_hook` of an attention module."""
    return partial(quantize_logits, bits=bits)


def quantize_probabilities(probabilities: Tensor, bits: int) -> Tensor:
    """Round probabilities [B, heads, S, T] to `bits` bits per row; a row of zeros stays."""
    scale = probabilities.abs().amax(-1, keepdim=True) / (2**bits - 1)
    return (probabilities / scale.masked_fill(scale == 0, 1)).round() * scale


class LowBitAttention(Arithmetic):
    """Low-bit keys, values, probabilities and products of a layer's scheme. But for probabilities, it is the reference
    for the device's operator."""

    def __init__(self, scheme: AttentionScheme, sliding_window: int = 0) -> None:
        self.scheme = scheme
        self.float16_tokens = scheme.window, scheme.first_tokens(sliding_window)

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int, of_values: bool = False) -> Tensor:
        scheme = self.scheme
        format = scheme.value_format if of_values else scheme.key_format
        keys = cached(key.float(), query.shape[2], format, *self.float16_tokens, not of_values)
        queries = (query.float() * scale).unflatten(1, (key.shape[1], -1))  # [B, G, r, S, d]
        return scores(queries, keys, scheme.query_bits).flatten(1, 2)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        groups, length, format = value.shape[1], probabilities.shape[2], self.scheme.value_format
        if self.scheme.probabilities is not None:
            probabilities = quantize_probabilities(probabilities, self.scheme.probabilities)
        rows = value.float().unflatten(-1, (-1, head_dim)).transpose(2, 3)  # [B, G, w, T, d]
        values = cached(rows.flatten(1, 2), length, format, *self.float16_tokens, False)
        shares = probabilities.unflatten(1, (groups, -1))  # [B, G, r, S, T]
        return mixed(shares, values.grouped(groups, rows.shape[2])).flatten(4).flatten(1, 2)


def rounded_state(state: Tensor, bits: int = 8) -> Tensor:
    """Return a state fp32 [..., d] as its quantized rows hold it."""
    codes, scale = quantize_rows(state, bits)
    return codes * scale[..., None]


def set_attention(model: nn.Module, scheme: AttentionScheme) -> None:
    """Apply a scheme's attention to every layer of a decoder or block."""
    for module in model.modules():
        if isinstance(module, Mixer) and scheme.states:
            module.rounded_state = rounded_state
        if isinstance(module, Attention):
            if scheme.logits is not None:
                module.logits_hook = logits_hook(scheme.logits)
            own = scheme.of_layer(module.layer_index if module.keys_of is None else module.keys_of)
            if own.is_low_bit or own.probabilities is not None:
                module.arithmetic = LowBitAttention(own, module.sliding_window)
