"""A scheme's attention on a device: attributes of the operator, and the buffers that hold keys and values.

Buffers of one layer and one sequence; `tokens` is the capacity, Hk the number of heads in the cache, d their width
(ops/kv_cache.py describes the numbers, ops/diff_attention.py how the operator uses them):

    format      key, value                         key_scale, value_scale          key_recent, value_recent
    float       T [Hk, tokens, d]
    fp16        float16 [Hk, tokens, d]
    int8        int8 [Hk, tokens, d]               float32 [Hk, tokens]
    int4, int2  uint8 [Hk, tokens, d * bits / 8]   float16 [Hk, tokens/32, 2, d]   float16 [Hk, window + 32, d]

T is the graph's float type. Keys and values may have different formats. With a sliding window, all buffers but the
recent ones are rings (`kv_cache.ring_rows`).

A state of a fixed size, fp32 [..., d], may be int8, too, with scales float32 [...] in a buffer <name>_scale. Each call
reads it, computes in float32, and rounds what it leaves, so results depend slightly on how tokens are split into calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..models import ModelConfig
from ..ops.cache import TOKENS, Buffer, CacheSpec, tokens_each
from ..ops.diff_attention import Signature
from ..ops.kv_cache import BITS, BLOCK, quantized_tokens, ring_rows
from .scheme import AttentionScheme

WITH_RINGS = {"always": "native", "native": "native", "never": "never"}  # in_place of a model's other buffers


def operator(
    scheme: AttentionScheme, branches: int, noise_ratio: int = 1, sliding_window: int = 0, appends: bool = True
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
    )


def cache_spec(config: ModelConfig, scheme: AttentionScheme, dtype: str) -> CacheSpec:
    """Return the cache of a model under a scheme; dtype: of buffers that are not low-bit."""
    kv = partial(buffers, scheme, dtype)
    layers = [layer.mixer.buffers(kv) for layer in config.layers]
    if any(buffer.ring for layer in layers for buffer in layer):  # GroupQueryAttention pads at the end, a ring in front
        layers = [tuple(replace(buffer, in_place=WITH_RINGS[buffer.in_place]) for buffer in layer) for layer in layers]
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
    """Return an attention layer's buffers in the operator's order, keys and values first.

    dtype, in_place: of float buffers. DiffAttention's kernel always writes low-bit buffers in place.
    """

    def tokens(format: str, block: int = 1) -> str:
        dim = TOKENS if block == 1 else f"{TOKENS}/{block}"
        return f"{dim}%{ring_rows(sliding_window, BITS[format]) // block}" if sliding_window else dim

    if scheme.is_low_bit and in_place != "never":
        in_place = "native"
    formats = {"key": scheme.key_format, "value": scheme.value_format}
    rows: list[tuple[str, str, tuple[int | str, ...]]] = []
    for part, format in formats.items():
        kind = {"float": dtype, "fp16": "float16", "int8": "int8"}.get(format, "uint8")
        width = head_dim * BITS[format] // 8 if kind == "uint8" else head_dim
        rows.append((part, kind, (heads, tokens(format), width)))
    for part, format in formats.items():
        if format == "int8":
            rows.append((f"{part}_scale", "float32", (heads, tokens(format))))
        elif BITS[format] < 8:
            rows.append((f"{part}_scale", "float16", (heads, tokens(format, BLOCK), 2, head_dim)))
    for part, format in formats.items():
        if BITS[format] < 8:
            rows.append((f"{part}_recent", "float16", (heads, scheme.window + BLOCK, head_dim)))
    return tuple(Buffer(name, kind, shape, in_place) for name, kind, shape in rows)


def step_bytes(config: ModelConfig, scheme: AttentionScheme, dtype: str, context: int) -> float:
    """Return the bytes of one sequence's cache, over all layers, that decoding one token reads and writes.

    context: tokens in the cache, including the new one. What is written once per group of tokens counts as a share.
    """
    low = quantized_tokens(context, scheme.window)
    givers = [layer.mixer.reads for layer in config.layers]
    total = 0.0
    for name, buffer in cache_spec(config, scheme, dtype).buffers.items():
        readers = 1 + givers.count(int(name.partition(".")[0]))
        format = scheme.key_format if buffer.name.startswith("key") else scheme.value_format
        stored = low if BITS[format] < 8 else context
        if buffer.name.endswith("recent"):
            total += buffer.nbytes(0) / (scheme.window + BLOCK) * (readers * (context - low) + 1)
        elif not buffer.holds_tokens:  # a state, which is read and written as a whole
            total += 2 * buffer.nbytes(0)
        elif buffer.ring:
            tokens = buffer.ring * next(tokens_each(dim) for dim in buffer.shape if isinstance(dim, str))
            total += buffer.nbytes(0) / tokens * (readers * min(stored, tokens) + 1)
        else:
            total += buffer.nbytes(BLOCK) / BLOCK * (readers * stored + 1)
    return total
