"""A scheme's attention on a device: attributes of the operator, and the buffers that hold keys and values.

Buffers of one layer and one sequence; `tokens` is the capacity, Hk the number of heads in the cache, d their width
(ops/kv_cache.py describes the numbers, ops/diff_attention.py how the operator uses them):

    format            key, value                         key_scale, value_scale   key_recent, value_recent
    float             T [Hk, tokens, d]
    fp16              float16 [Hk, tokens, d]
    int8              int8 [Hk, tokens, d]               float16 [Hk, tokens]
    int4, int3, int2  uint8 [Hk, tokens, d * bits / 8]   float16 [Hk, tokens]     float16 [Hk, R, d]

T is the graph's float type. R = first + window + 32, and one more for the offset of the keys. Keys and values may have
different formats. With a sliding window, first is 0, and all buffers but the recent ones are rings
(`kv_cache.ring_rows`).

A state of a fixed size, fp32 [..., d], may be int8, too, with scales float32 [...] in a buffer <name>_scale. Each call
reads it, computes in float32, and rounds what it leaves, so results depend slightly on how tokens are split into calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..models import ModelConfig
from ..ops.cache import TOKENS, Buffer, CacheSpec
from ..ops.diff_attention import Signature
from ..ops.kv_cache import BITS, BLOCK, quantized_tokens, ring_rows
from .scheme import AttentionScheme

# in_place of the float buffers of a model in which some layers have rings or low-bit buffers
IN_DIFF_ATTENTION = {"always": "native", "native": "native", "never": "never"}


def operator(
    scheme: AttentionScheme,
    branches: int,
    noise_ratio: int = 1,
    sliding_window: int = 0,
    appends: bool = True,
    gates: bool = False,
) -> Signature:
    """Return the signature of the operator that computes this attention."""
    return Signature(
        key_bits=BITS[scheme.key_format],
        value_bits=BITS[scheme.value_format],
        query_bits=scheme.query_bits,
        branches=branches,
        noise_ratio=noise_ratio,
        sliding_window=sliding_window,
        appends=appends,
        gates=gates,
    )


def cache_spec(config: ModelConfig, scheme: AttentionScheme, dtype: str) -> CacheSpec:
    """Return the cache of a model under a scheme; dtype: of buffers that are not low-bit."""
    schemes = zip(config.layers, scheme.of_model(config), strict=True)
    layers = [layer.mixer.buffers(partial(buffers, of_layer, dtype)) for layer, of_layer in schemes]
    if any(buffer.ring for layer in layers for buffer in layer) or (scheme.layers and scheme.is_low_bit):
        # GroupQueryAttention pads at the end; rings and low-bit caches, in front
        layers = [
            tuple(replace(buffer, in_place=IN_DIFF_ATTENTION[buffer.in_place]) for buffer in layer) for layer in layers
        ]
    if scheme.states:
        layers = [tuple(part for buffer in layer for part in _int8_state(buffer)) for layer in layers]
    return CacheSpec(tuple(layers))


def _int8_state(buffer: Buffer) -> tuple[Buffer, ...]:
    """Return a state's codes and scales; keys and values as they are."""
    if buffer.holds_tokens:
        return (buffer,)
    return Buffer(buffer.name, "int8", buffer.shape), Buffer(f"{buffer.name}_scale", "float32", buffer.shape[:-1])


def buffers(
    scheme: AttentionScheme, dtype: str, heads: int, head_dim: int, in_place: str, sliding_window: int
) -> tuple[Buffer, ...]:
    """Return an attention layer's buffers, under its own scheme, in the operator's order, keys and values first.

    dtype, in_place: of float buffers. DiffAttention's kernel always writes low-bit buffers in place.
    """

    if scheme.is_low_bit and in_place != "never":
        in_place = "native"
    formats = {"key": scheme.key_format, "value": scheme.value_format}
    codes, scales, recents = [], [], []
    for part, format in formats.items():
        bits = BITS[format]
        tokens = f"{TOKENS}%{ring_rows(sliding_window, bits)}" if sliding_window else TOKENS
        window = scheme.window if bits < 8 else None
        kind = {"float": dtype, "fp16": "float16", "int8": "int8"}.get(format, "uint8")
        codes.append(Buffer(part, kind, (heads, tokens, head_dim * min(bits, 8) // 8), in_place, window))
        if bits <= 8:
            scales.append(Buffer(f"{part}_scale", "float16", (heads, tokens), in_place, window))
        if window is not None:
            rows = scheme.first_tokens(sliding_window) + (part == "key") + window + BLOCK
            recents.append(Buffer(f"{part}_recent", "float16", (heads, rows, head_dim), in_place, window))
    return (*codes, *scales, *recents)


def cache_bits(config: ModelConfig, scheme: AttentionScheme) -> float:
    """Return the bits of a number of keys and values that grow with the context, scales included, on average; 16 if
    there are none."""
    halves = cache_spec(config, AttentionScheme(), "float16").bytes_per_1k_tokens
    return 16 * cache_spec(config, scheme, "float16").bytes_per_1k_tokens / halves if halves else 16.0


def step_bytes(config: ModelConfig, scheme: AttentionScheme, dtype: str, context: int) -> float:
    """Return the bytes of one sequence's cache, over all layers, that decoding one token reads and writes.

    context: tokens in the cache, including the new one. The codes of first tokens are not read, because these tokens
    are in float16, too. A block of tokens that leaves the residual window counts as a row of codes for each new token.
    """
    low = quantized_tokens(context, scheme.window)
    givers = [layer.mixer.reads for layer in config.layers]
    total = 0.0
    for name, buffer in cache_spec(config, scheme, dtype).buffers.items():
        readers = 1 + givers.count(int(name.partition(".")[0]))
        seen = min(context, buffer.ring or context)
        stored = seen  # rows that are read
        if buffer.window is not None:
            stored = max(0, seen - (context - low) - (0 if buffer.ring else scheme.first))
        if not buffer.holds_tokens:  # a state, which is read and written as a whole
            total += 2 * buffer.nbytes(0)
        elif buffer.ring:
            total += buffer.nbytes(0) / buffer.ring * (readers * stored + 1)
        elif buffer.grows:
            total += buffer.nbytes(1) * (readers * stored + 1)
        else:  # recent tokens, and behind codes the first ones and the offset
            rows = int(buffer.shape[1])
            read = context - low + (rows - scheme.window - BLOCK if low else 0)
            total += buffer.nbytes(0) / rows * (readers * read + 1)
    return total
