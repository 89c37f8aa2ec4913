"""One table of cases for every implementation of an op: torch reference, ONNX body, and each kernel."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from diffbit.ops import causal_conv, diff_attention, int4_matmul, int8_matmul, lowbit_matmul, selective_scan, trellis

DRAW = int(os.environ.get("DIFFBIT_TEST_DRAW", "0"))  # another one: other random numbers in all cases


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 1000 * DRAW)


@functools.cache
def _quantized(tokens: int, window: int) -> int:
    return next(n for n in range(tokens // 32 * 32, -1, -32) if n == 0 or tokens - n >= window)


@dataclass(frozen=True)
class AttentionCase:
    """A call of DiffAttention; `beyond` is the room in the cache behind the new tokens, None a growing cache."""

    name: str
    batch: int = 1
    steps: int = 5
    past: int = 0
    beyond: int | None = None
    heads: int = 2
    kv_heads: int = 2  # Hk, the sub-heads of the cache
    d: int = 8
    wide_value: bool = True
    norm_eps: float = 1e-5
    token_lambda: bool = False
    padding: str = "none"  # "left" and "right" hide keys of the batch's first row
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None  # of 16-bit keys and values; None: as dtype
    branches: int = 2
    noise_ratio: int = 1
    key_bits: int = 16
    value_bits: int = 16
    query_bits: int = 0
    window: int = 32
    first: int = 4
    sliding_window: int = 0
    query_only: bool = False  # reads a cache that holds its own tokens
    gates: float | None = None  # the share of a mixture's gates that are not 0
    seed: int = 0

    @property
    def total(self) -> int:
        return self.past + self.steps

    def quantized(self, tokens: int) -> int:
        """How many of `tokens` a cache below 8 bits holds as codes."""
        return _quantized(tokens, self.window)

    def signature(self) -> diff_attention.Signature:
        return diff_attention.Signature(
            self.key_bits,
            self.value_bits,
            self.query_bits,
            self.branches,
            self.noise_ratio,
            self.sliding_window,
            not self.query_only,
            self.gates is not None,
        )

    def ring(self, bits: int) -> int:
        """Slots of a sliding window's buffer; 0: it is no ring."""
        return -(-self.sliding_window // 32) * 32 if bits < 8 else self.sliding_window

    def bits_of(self, buffer: str) -> int:
        return self.key_bits if "key" in buffer else self.value_bits

    def filled(self, present: str) -> int:
        """Slots of an output that hold tokens, along its third dimension; not of recent tokens."""
        bits = self.bits_of(present)
        tokens = self.total if bits >= 8 else self.quantized(self.total)
        return min(tokens, self.ring(bits)) if self.sliding_window else tokens

    def recent_slots(self, buffer: str, tokens: int) -> list[int]:
        """Slots of a buffer of recent tokens that hold rows when the cache holds so many tokens: of the first tokens,
        of the offset, of the residual window."""
        quantized, offset = self.quantized(tokens), self.first if "key" in buffer else None
        residual = self.first + (offset is not None)
        return [
            *range(min(self.first, tokens)),
            *([offset] if offset is not None and quantized else []),
            *range(residual, residual + tokens - quantized),
        ]

    def defined(self, present: str) -> slice | list[int]:
        """Slots of an output whose contents are defined, along its third dimension."""
        return self.recent_slots(present, self.total) if present.endswith("recent") else slice(None)

    def inputs(self) -> dict[str, torch.Tensor | None]:
        """Random inputs in the op's order, None those that the node has no use for.

        What lies in the buffers beyond `past` is poisoned: NaN in floats, random codes.
        """
        g = generator(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(self.dtype)

        def poisoned(filled: torch.Tensor, slots: int) -> torch.Tensor:
            buffer = torch.full((*filled.shape[:2], slots, *filled.shape[3:]), float("nan"), dtype=filled.dtype)
            buffer[:, :, : filled.shape[2]] = filled
            return buffer

        def cache(name: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            bits = self.bits_of(name)
            heads, ring = (self.batch, self.kv_heads), self.ring(bits)
            tokens_held = self.total if self.query_only else self.past
            capacity = ring or (tokens_held if self.beyond is None else self.total + self.beyond)
            past = min(tokens_held, capacity)
            if bits == 16:
                rows = normal(*heads, past, self.d).to(self.cache or self.dtype)
                return poisoned(rows, capacity), None, None
            if bits == 8:
                codes = torch.randint(-127, 128, (*heads, capacity, self.d), generator=g).to(torch.int8)
                return codes, poisoned((torch.rand(*heads, past, generator=g) * 0.02).half(), capacity), None
            past = quantized = self.quantized(tokens_held)
            capacity = past if self.beyond is None else -(-(self.quantized(self.total) + self.beyond) // 32) * 32
            if ring:
                past, capacity = min(past, ring), ring
            codes = torch.randint(256, (*heads, capacity, self.d * bits // 8), generator=g).to(torch.uint8)
            scales = ((torch.rand(*heads, past, generator=g) + 0.5) * 2.5 / 127).half()
            slots = self.recent_slots(name, tokens_held)
            rows = torch.randn(*heads, len(slots), self.d, generator=g).half()
            if not quantized:  # the first tokens are in the residual window, too
                count = min(self.first, tokens_held)
                rows[:, :, :count] = rows[:, :, count : 2 * count]
            recent = poisoned(rows[:, :, :0], self.first + (name == "key") + self.window + 32)
            recent[:, :, slots] = rows
            return codes, poisoned(scales, capacity), recent

        mask = torch.ones(self.batch, self.total, dtype=torch.int64)
        if self.padding == "left":
            mask[0, :3] = 0
        elif self.padding == "right":
            mask[0, -2:] = 0
        angles = torch.arange(self.total + 3)[:, None] * 0.7 ** torch.arange(self.d // 2)
        lam_shape = (self.batch, self.steps, self.heads) if self.token_lambda else (self.heads,)
        query_heads = self.heads + (self.branches - 1) * self.heads // self.noise_ratio
        query = normal(self.batch, self.steps, query_heads * self.d) * 2
        key = normal(self.batch, self.steps, self.kv_heads * self.d) * 2
        value = normal(self.batch, self.steps, self.kv_heads * self.d)
        if self.key_bits < 16 and self.steps:
            key[:, 0, : self.d] = 0  # a row of zeros has scale 0
        if self.value_bits < 16 and self.steps:
            value[:, 1:2, : self.d] = 0
        lam = torch.rand(lam_shape, generator=g) if self.branches == 2 else None
        if self.query_only:
            key = value = None
        past_key, past_key_scale, past_key_recent = cache("key")
        past_value, past_value_scale, past_value_recent = cache("value")
        inputs = {
            "query": query,
            "key": key,
            "value": value,
            "lambda": lam,
            "past_key": past_key,
            "past_value": past_value,
            "past_length": torch.tensor([self.past]),
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, self.past :],
            "cos": angles.cos(),
            "sin": angles.sin(),
            "attention_mask": mask,
            "past_key_scale": past_key_scale,
            "past_value_scale": past_value_scale,
            "past_key_recent": past_key_recent,
            "past_value_recent": past_value_recent,
            "gates": self.random_gates(g),
        }
        while inputs[last := next(reversed(inputs))] is None:
            del inputs[last]
        return inputs

    def random_gates(self, g: torch.Generator) -> torch.Tensor | None:
        """Gates of which so many are not 0, [B, S, H]; None: the node has none."""
        if self.gates is None:
            return None
        shape = self.batch, self.steps, self.heads
        on = torch.rand(shape, generator=g) < self.gates
        return (torch.rand(shape, generator=g) + 0.5) * on

    def attributes(self) -> dict[str, int | float]:
        """The node's attributes."""
        values = {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "branches": self.branches,
            "noise_ratio": self.noise_ratio,
            "wide_value": int(self.wide_value),
            "scale": 1 / math.sqrt(self.d),
            "norm_eps": self.norm_eps,
            "key_bits": self.key_bits,
            "value_bits": self.value_bits,
            "query_bits": self.query_bits,
            "window": self.window,
            "first": 0 if self.sliding_window else self.first,
            "sliding_window": self.sliding_window,
        }
        return diff_attention.OP.attributes_of(values)


_V1 = AttentionCase("v1_prefill")
_V2 = replace(_V1, name="v2_prefill", kv_heads=1, wide_value=False, norm_eps=0.0, token_lambda=True)
_GROUPED = replace(_V1, name="grouped", heads=8, kv_heads=4, noise_ratio=4)
_SOFTMAX = replace(_V2, name="softmax", heads=4, kv_heads=2, d=32, branches=1, token_lambda=False)


def _low(
    name: str, keys: int, values: int, query: int = 0, *, base: AttentionCase = _V1, d: int = 32, **changes: Any
) -> AttentionCase:
    """A case of low-bit keys, values and queries."""
    return replace(base, name=name, key_bits=keys, value_bits=values, query_bits=query, d=d, **changes)


ATTENTION_CASES = [
    _V1,
    replace(_V1, name="v1_one_token", steps=1),
    replace(_V1, name="v1_decode", steps=1, past=9),
    replace(_V1, name="v1_decode_buffer", steps=1, past=9, beyond=7),
    replace(_V1, name="v1_decode_full_buffer", steps=1, past=9, beyond=0),
    replace(_V1, name="v1_chunk", steps=4, past=6, seed=1),
    replace(_V1, name="v1_chunk_buffer", steps=4, past=6, beyond=3, seed=1),
    replace(_V1, name="v1_gqa2", heads=4, kv_heads=4, batch=2, seed=2),
    replace(_V1, name="v1_gqa4_decode", heads=8, kv_heads=4, steps=1, past=13, seed=3),
    replace(_V1, name="v1_wide_d", d=64, heads=3, kv_heads=6, steps=7, past=2, seed=4),
    replace(_V1, name="v1_left", batch=2, padding="left", seed=5),
    replace(_V1, name="v1_right", batch=2, padding="right", seed=6),
    replace(_V1, name="v1_left_decode", batch=2, padding="left", steps=1, past=8, beyond=2, seed=7),
    replace(_V1, name="v1_fp16", dtype=torch.float16, steps=3, past=4, beyond=2, seed=8),
    replace(_V1, name="v1_token_lambda", token_lambda=True, batch=2, seed=9),
    replace(_V1, name="v1_no_norm", norm_eps=0.0, seed=10),
    _V2,
    replace(_V2, name="v2_gqa2_decode", heads=4, kv_heads=2, steps=1, past=9, beyond=4, batch=2, seed=11),
    replace(_V2, name="v2_gqa4_chunk", heads=8, kv_heads=2, steps=4, past=3, seed=12),
    replace(_V2, name="v2_left", batch=2, padding="left", seed=13),
    replace(_V2, name="v2_fp16", dtype=torch.float16, past=5, seed=14),
    # Several chunks of the context, one block of queries, several, their edges
    replace(_V1, name="v1_long_decode", steps=1, past=700, beyond=3, d=16, padding="left", batch=2, seed=15),
    replace(_V1, name="v1_chunk_edge", steps=2, past=254, heads=1, seed=16),
    replace(_V1, name="v1_past_chunk_edge", steps=3, past=255, heads=1, seed=17),
    replace(_V1, name="v1_long_prefill", steps=67, past=0, heads=1, d=64, seed=18),
    replace(_V1, name="v1_long_prefill_left", steps=35, heads=1, padding="left", beyond=4, d=32, seed=19),
    replace(_V1, name="v1_prefill_behind_past", steps=18, past=290, heads=1, beyond=9, d=16, seed=20),
    replace(_V1, name="v1_gqa8_decode", heads=8, steps=1, past=300, beyond=1, d=32, seed=21),
    replace(_V1, name="v1_gqa4_prefill", heads=4, steps=21, past=2, beyond=0, d=16, batch=2, seed=22),
    replace(_V1, name="v1_gqa32_decode", heads=32, steps=1, past=40, d=8, padding="right", seed=23),
    replace(_V2, name="v2_long_decode", steps=1, past=530, beyond=2, d=64, seed=24),
    replace(_V2, name="v2_long_prefill", steps=40, past=1, heads=3, d=24, padding="right", seed=25),
    # Widths that no vector divides
    replace(_V1, name="v1_d20_decode", d=20, steps=1, past=40, beyond=3, seed=26),
    replace(_V1, name="v1_d20_prefill", d=20, steps=19, past=3, beyond=3, seed=27),
    replace(_V1, name="v1_d2", d=2, steps=3, past=3, beyond=0, seed=28),
    replace(_V1, name="v1_d80_fp16", d=80, steps=20, past=3, dtype=torch.float16, heads=1, seed=29),
    replace(_V1, name="v1_d128_gqa2_decode", d=128, heads=2, steps=1, past=50, beyond=3, seed=30),
    # A cache of its own type
    replace(_V1, name="v1_cache_fp16", cache=torch.float16, steps=3, past=6, d=16, seed=31),
    replace(_V1, name="v1_cache_fp16_prefill", cache=torch.float16, steps=40, past=6, beyond=2, d=16, heads=1, seed=32),
    replace(_V1, name="v1_cache_fp16_decode", cache=torch.float16, steps=1, past=300, beyond=5, d=64, heads=4, seed=33),
    replace(_V1, name="v1_fp16_cache_fp32", dtype=torch.float16, cache=torch.float32, steps=1, past=19, d=16, seed=34),
    _low("v1_int8", 8, 8, d=8, seed=35),
    _low("v1_int8_decode", 8, 8, steps=1, past=300, beyond=5, d=64, heads=4, seed=36),
    _low("v1_int8_prefill", 8, 8, steps=40, past=7, beyond=2, d=20, heads=1, seed=37),
    _low("v1_int8_fp16", 8, 8, dtype=torch.float16, steps=2, past=30, d=36, batch=2, seed=38),
    _low("v1_int8_left", 8, 8, d=8, past=9, padding="left", batch=2, beyond=0, seed=39),
    _low("v2_int8_decode", 8, 8, base=_V2, steps=1, past=70, beyond=1, heads=4, seed=40),
    _low("v2_int8_prefill", 8, 8, base=_V2, steps=20, heads=3, d=16, seed=41),
    # A plain softmax over the same cache
    replace(_SOFTMAX, name="softmax_prefill", steps=20, seed=42),
    replace(_SOFTMAX, name="softmax_decode", steps=1, past=90, beyond=3, batch=2, padding="left", seed=43),
    replace(_SOFTMAX, name="softmax_fp16", dtype=torch.float16, past=11, seed=44),
    _low("softmax_int8_decode", 8, 8, base=_SOFTMAX, steps=1, past=90, beyond=3, seed=45),
    _low("softmax_int4_chunk", 4, 4, base=_SOFTMAX, steps=40, past=70, seed=46),
    _low("softmax_int4_query8_decode", 4, 4, 8, base=_SOFTMAX, steps=1, past=101, beyond=0, d=64, seed=47),
    # Noise heads that several signal heads share
    replace(_GROUPED, name="grouped_prefill", steps=21, past=3, d=16, seed=110),
    replace(_GROUPED, name="grouped_decode", steps=1, past=300, beyond=3, d=64, batch=2, padding="left", seed=111),
    replace(_GROUPED, name="grouped_fp16", noise_ratio=2, kv_heads=2, steps=2, past=19, dtype=torch.float16, seed=112),
    replace(_V2, name="grouped_v2", heads=6, kv_heads=2, noise_ratio=3, steps=3, past=9, batch=2, seed=113),
    _low("grouped_v2_int4_decode", 4, 4, base=_V2, heads=8, kv_heads=2, noise_ratio=4, steps=1, past=99, seed=119),
    _low("grouped_int8_decode", 8, 8, base=_GROUPED, steps=1, past=70, beyond=1, d=128, seed=114),
    _low("grouped_int8_query8", 8, 8, 8, base=_GROUPED, steps=1, past=300, d=64, seed=115),
    _low("grouped_int4_decode", 4, 4, base=_GROUPED, steps=1, past=300, beyond=3, d=64, seed=116),
    _low("grouped_int4_chunk", 4, 4, 4, base=_GROUPED, noise_ratio=2, steps=5, past=93, seed=117),
    _low("grouped_int4_prefill", 4, 4, base=_GROUPED, steps=70, past=20, kv_heads=2, heads=4, seed=118),
    # Blocks: nothing quantized, a block, several; in one call and token by token; the buffers full, with room, growing
    _low("int4_unsettled", 4, 4, steps=5, past=3, beyond=0, seed=50),
    _low("int4_first_group", 4, 4, steps=1, past=63, seed=51),
    _low("int4_first_group_buffer", 4, 4, steps=1, past=63, beyond=0, seed=52),
    _low("int4_decode", 4, 4, steps=1, past=100, beyond=40, heads=4, kv_heads=4, batch=2, seed=53),
    _low("int4_decode_full_buffer", 4, 4, steps=1, past=100, beyond=0, d=64, seed=54),
    _low("int4_decode_group", 4, 4, steps=1, past=127, beyond=32, d=64, heads=4, seed=55),
    _low("int4_long_decode", 4, 4, steps=1, past=700, beyond=3, padding="left", batch=2, seed=56),
    _low("int4_prefill", 4, 4, steps=150, heads=1, seed=57),
    _low("int4_prefill_buffer", 4, 4, steps=97, heads=1, beyond=64, d=64, seed=58),
    _low("int4_chunk", 4, 4, steps=50, past=70, heads=1, seed=59),
    _low("int4_chunk_two_groups", 4, 4, steps=70, past=60, beyond=0, heads=1, seed=60),
    _low("int4_window0", 4, 4, window=0, steps=40, heads=1, seed=61),
    _low("int4_window0_own_group", 4, 4, window=0, steps=1, past=31, beyond=5, seed=62),
    _low("int4_window0_no_recent", 4, 4, window=0, steps=1, past=64, seed=63),
    _low("int4_window0_chunk", 4, 4, window=0, steps=64, past=64, beyond=0, heads=1, seed=64),
    _low("int4_window64", 4, 4, window=64, steps=9, past=90, beyond=2, seed=65),
    _low("int4_window20", 4, 4, window=20, steps=9, past=47, seed=66),
    _low("int4_d96", 4, 4, d=96, steps=3, past=66, beyond=1, seed=67),
    _low("int4_d128_gqa2", 4, 4, d=128, heads=4, kv_heads=4, steps=1, past=97, seed=68),
    _low("int4_fp16", 4, 4, dtype=torch.float16, steps=35, past=64, beyond=3, heads=1, seed=69),
    _low("int4_left", 4, 4, padding="left", batch=2, steps=70, seed=70),
    _low("int4_right", 4, 4, padding="right", batch=2, steps=4, past=94, beyond=0, seed=71),
    _low("int2_prefill", 2, 2, steps=100, heads=1, seed=72),
    _low("int2_decode", 2, 2, steps=1, past=159, beyond=1, d=64, seed=73),
    _low("int2_d128_chunk", 2, 2, d=128, steps=33, past=40, heads=1, seed=74),
    _low("v2_int4_decode", 4, 4, base=_V2, steps=1, past=95, beyond=7, heads=4, kv_heads=2, d=64, seed=75),
    _low("v2_int4_prefill_fp16", 4, 4, base=_V2, steps=70, dtype=torch.float16, seed=76),
    _low("int3_prefill", 3, 3, steps=100, heads=1, seed=160),
    _low("int3_decode", 3, 3, steps=1, past=159, beyond=1, d=64, heads=4, kv_heads=4, batch=2, seed=161),
    _low("int3_decode_group", 3, 3, steps=1, past=127, beyond=32, d=128, seed=162),
    _low("int3_chunk", 3, 3, d=96, steps=33, past=40, heads=1, padding="left", batch=2, seed=163),
    _low("v2_int3_fp16", 3, 3, base=_V2, steps=2, past=95, heads=4, kv_heads=2, dtype=torch.float16, seed=164),
    # First tokens: none, one, the most; some there already; all in a window that nothing has left
    _low("int4_first0", 4, 4, first=0, steps=40, past=30, heads=1, seed=165),
    _low("int4_first0_decode", 4, 4, first=0, steps=1, past=100, beyond=3, d=64, seed=166),
    _low("int4_first1_decode", 4, 4, first=1, steps=1, past=63, beyond=0, seed=167),
    _low("int3_first16_chunk", 3, 4, first=16, window=0, steps=30, past=7, heads=1, seed=168),
    _low("int2_first16_decode", 2, 3, first=16, steps=1, past=15, beyond=0, seed=169),
    _low("int4_first_tokens_arrive", 4, 4, first=9, steps=4, past=2, beyond=0, seed=170),
    _low("int4_first_tokens_leave", 4, 2, first=9, window=0, steps=30, past=2, beyond=0, heads=1, seed=171),
    _low("int3_query8_first16", 3, 16, 8, first=16, steps=1, past=159, batch=2, padding="left", seed=172),
    # Keys and values of different bits
    _low("int4_keys", 4, 16, steps=4, past=94, beyond=3, seed=80),
    _low("int4_keys_fp16_values", 4, 16, cache=torch.float16, steps=40, past=60, heads=1, seed=81),
    _low("int4_keys_int8_values", 4, 8, steps=3, past=94, beyond=0, seed=82),
    _low("int4_keys_int2_values", 4, 2, steps=66, past=30, heads=1, seed=83),
    _low("int8_keys", 8, 16, steps=4, past=20, seed=84),
    _low("int8_keys_int4_values", 8, 4, steps=4, past=94, beyond=3, seed=85),
    _low("int8_values", 16, 8, steps=4, past=20, beyond=1, seed=86),
    _low("int4_values", 16, 4, steps=40, past=30, heads=1, seed=87),
    _low("int2_values_decode", 16, 2, steps=1, past=95, cache=torch.float16, beyond=3, seed=88),
    # Queries in integers
    _low("int8_query8", 8, 8, 8, steps=6, past=40, beyond=3, seed=90),
    _low("int8_query8_decode", 8, 8, 8, steps=1, past=300, beyond=5, d=64, heads=4, seed=91),
    _low("int8_query4_d20", 8, 16, 4, d=20, steps=20, past=3, seed=92),
    _low("int4_query8_prefill", 4, 4, 8, steps=100, heads=1, seed=93),
    _low("int4_query8_decode", 4, 4, 8, steps=1, past=200, beyond=5, d=64, heads=4, seed=94),
    _low("int4_query4_chunk", 4, 4, 4, steps=50, past=70, heads=1, d=128, seed=95),
    _low("int4_query4_decode", 4, 4, 4, steps=1, past=95, beyond=32, d=96, kv_heads=4, heads=4, seed=96),
    _low("int4_query4_unsettled", 4, 4, 4, steps=7, beyond=3, d=64, seed=89),
    _low("int4_query4_fp16_left", 4, 8, 4, dtype=torch.float16, padding="left", batch=2, steps=70, seed=97),
    _low("int2_query4", 2, 2, 4, window=0, steps=34, past=40, heads=1, seed=98),
    _low("int2_query8_decode", 2, 4, 8, steps=1, past=127, d=64, seed=99),
    _low("int3_query8_decode", 3, 2, 8, steps=1, past=200, beyond=5, d=64, heads=4, seed=173),
    _low("int3_query4_chunk", 3, 3, 4, steps=50, past=70, heads=1, d=128, seed=174),
    _low("v2_int8_query8", 8, 8, 8, base=_V2, steps=21, past=5, heads=4, kv_heads=2, batch=2, seed=100),
    _low("v2_int4_query4_decode", 4, 4, 4, base=_V2, steps=1, past=150, beyond=0, heads=4, kv_heads=2, seed=101),
    # More tokens than a kernel's block of keys, and more queries
    _low("int8_query8_long", 8, 8, 8, steps=35, past=500, beyond=9, heads=1, seed=102),
    _low("int4_query4_long", 4, 4, 4, steps=35, past=520, beyond=9, heads=2, seed=103),
    _low("int4_long_prefill_behind_past", 4, 4, steps=18, past=590, heads=1, beyond=9, padding="right", seed=104),
]

_WINDOW = replace(_V1, name="window", sliding_window=16, first=0)


def _ring(
    name: str, keys: int, values: int, query: int = 0, *, sliding_window: int = 50, **changes: Any
) -> AttentionCase:
    return _low(name, keys, values, query, base=_WINDOW, sliding_window=sliding_window, **changes)


# A sliding window: not yet full, just full, turned once and four times; few tokens and many, more than it has
RING_CASES = [
    replace(_WINDOW, name="ring_not_full", steps=5, past=4, beyond=0, seed=200),
    replace(_WINDOW, name="ring_fills", steps=5, past=11, beyond=0, seed=201),
    replace(_WINDOW, name="ring_turns", steps=5, past=13, batch=2, padding="left", beyond=0, seed=202),
    replace(_WINDOW, name="ring_first_turn", steps=1, past=16, batch=2, padding="left", beyond=0, seed=203),
    replace(_WINDOW, name="ring_decode", steps=1, past=70, heads=4, kv_heads=4, beyond=0, seed=204),
    replace(_WINDOW, name="ring_chunk", steps=3, past=64, d=16, beyond=0, seed=205),
    replace(_WINDOW, name="ring_prompt", steps=70, d=16, batch=2, padding="left", beyond=0, seed=206),
    replace(_WINDOW, name="ring_prompt_behind_past", steps=37, past=61, heads=4, d=20, beyond=0, seed=207),
    replace(_WINDOW, name="ring_prompt_right", steps=40, past=7, batch=2, padding="right", heads=1, seed=270),
    replace(_WINDOW, name="ring_of_one", sliding_window=1, steps=4, past=3, beyond=0, seed=209),
    replace(_WINDOW, name="ring_of_one_prompt", sliding_window=1, steps=30, past=3, beyond=0, seed=210),
    replace(_WINDOW, name="ring_wide", sliding_window=300, steps=1, past=900, d=16, batch=2, beyond=0, seed=211),
    replace(
        _WINDOW, name="ring_wide_prompt", sliding_window=300, steps=60, past=400, heads=1, d=16, beyond=0, seed=212
    ),
    replace(_WINDOW, name="ring_fp16", steps=2, past=30, dtype=torch.float16, beyond=0, seed=213),
    replace(_WINDOW, name="ring_fp16_prompt", steps=40, past=30, d=24, dtype=torch.float16, beyond=0, seed=214),
    replace(_WINDOW, name="ring_cache_fp16", steps=21, past=30, cache=torch.float16, beyond=0, seed=215),
    replace(_V2, name="ring_v2", sliding_window=20, steps=1, past=81, heads=4, kv_heads=2, batch=2, beyond=0, seed=216),
    replace(_V2, name="ring_v2_prompt", sliding_window=20, steps=50, past=9, heads=4, kv_heads=2, seed=217),
    replace(_SOFTMAX, name="ring_softmax", sliding_window=33, steps=1, past=140, beyond=0, seed=218),
    replace(_SOFTMAX, name="ring_softmax_prompt", sliding_window=33, steps=50, past=90, beyond=0, seed=219),
    replace(_GROUPED, name="ring_grouped", sliding_window=20, steps=2, past=81, beyond=0, seed=220),
    _ring("ring_int8_not_full", 8, 8, steps=5, past=20, beyond=0, seed=221),
    _ring("ring_int8_decode", 8, 8, steps=1, past=210, heads=4, batch=2, padding="left", beyond=0, seed=222),
    _ring("ring_int8_chunk", 8, 8, 8, steps=4, past=98, d=20, beyond=0, seed=223),
    _ring("ring_int8_prompt", 8, 8, steps=160, past=49, heads=1, d=20, beyond=0, seed=224),
    _ring("ring_int8_query8_prompt", 8, 8, 8, steps=70, past=130, d=64, beyond=0, seed=225),
    _ring("ring_int4_not_full", 4, 4, steps=9, past=40, beyond=0, seed=226),
    _ring("ring_int4_between", 4, 4, steps=1, past=57, beyond=0, seed=227),  # more than the window, less than blocks
    _ring("ring_int4_decode", 4, 4, steps=1, past=211, heads=4, batch=2, padding="left", beyond=0, seed=228),
    _ring("ring_int4_decode_block", 4, 4, steps=1, past=255, d=64, beyond=0, seed=229),
    _ring("ring_int4_chunk", 4, 4, 4, steps=5, past=221, d=64, beyond=0, seed=230),
    _ring("ring_int4_prompt", 4, 4, steps=210, heads=1, beyond=0, seed=231),
    _ring("ring_int4_prompt_behind_past", 4, 4, steps=70, past=203, heads=1, d=64, batch=2, beyond=0, seed=232),
    _ring("ring_int4_query8_prompt", 4, 4, 8, steps=45, past=150, heads=1, beyond=0, seed=233),
    _ring("ring_int4_window0", 4, 4, window=0, steps=1, past=95, beyond=0, seed=234),
    _ring("ring_int4_window0_prompt", 4, 4, window=0, steps=64, past=64, heads=1, beyond=0, seed=235),
    _ring("ring_int4_window70", 4, 4, window=70, steps=3, past=201, beyond=0, seed=236),  # none seen is quantized
    _ring("ring_int4_window70_prompt", 4, 4, window=70, steps=90, past=120, heads=1, beyond=0, seed=237),
    _ring("ring_int4_of_20", 4, 4, sliding_window=20, window=0, steps=1, past=83, beyond=0, seed=238),
    _ring("ring_int4_of_20_prompt", 4, 4, sliding_window=20, window=5, steps=50, past=83, beyond=0, seed=239),
    _ring("ring_int4_wide", 4, 4, sliding_window=310, steps=1, past=800, d=64, beyond=0, seed=240),
    _ring("ring_int2_prompt", 2, 2, steps=40, past=190, heads=1, beyond=0, seed=241),
    _ring("ring_int2_query4", 2, 2, 4, steps=1, past=190, beyond=0, seed=242),
    _ring("ring_int3_query8", 3, 3, 8, steps=1, past=211, d=64, beyond=0, seed=247),
    _ring("ring_int3_prompt", 3, 3, steps=45, past=190, heads=1, beyond=0, seed=248),
    _ring("ring_int4_keys", 4, 16, steps=1, past=131, beyond=0, seed=243),
    _ring("ring_int4_values_prompt", 16, 4, steps=40, past=131, heads=1, beyond=0, seed=244),
    _ring("ring_int8_keys_int2_values", 8, 2, 8, steps=3, past=190, beyond=0, seed=245),
    _ring("ring_int4_keys_int8_values_prompt", 4, 8, steps=60, past=131, heads=1, beyond=0, seed=246),
]

_READ = replace(_V1, name="read", query_only=True)
# Queries that read another node's cache: those of its last tokens
QUERY_ONLY_CASES = [
    replace(_READ, name="read_decode", steps=1, past=90, heads=4, kv_heads=4, batch=2, padding="left", seed=250),
    replace(_READ, name="read_prompt", steps=40, past=3, d=20, seed=251),
    replace(_READ, name="read_fp16", steps=3, past=50, d=24, beyond=4, dtype=torch.float16, seed=252),
    replace(_V2, name="read_v2", query_only=True, steps=2, past=300, heads=4, kv_heads=2, beyond=3, seed=253),
    replace(_SOFTMAX, name="read_softmax", query_only=True, steps=21, past=60, batch=2, padding="right", seed=254),
    _low("read_int8", 8, 8, 8, base=_READ, steps=1, past=300, heads=4, d=64, beyond=9, seed=255),
    _low("read_int8_prompt", 8, 8, base=_READ, steps=30, past=40, heads=1, d=20, seed=256),
    _low("read_int4", 4, 4, base=_READ, steps=1, past=300, heads=4, d=64, batch=2, padding="left", beyond=9, seed=257),
    _low("read_int4_chunk", 4, 4, 4, base=_READ, steps=5, past=300, d=64, seed=258),
    _low("read_int4_prompt", 4, 4, base=_READ, steps=70, past=100, heads=1, seed=259),
    _low("read_int4_short", 4, 4, 8, base=_READ, steps=4, past=20, beyond=0, seed=260),
    _low("read_int3", 3, 3, 8, base=_READ, steps=2, past=130, heads=4, d=64, beyond=9, seed=262),
    _low("read_int3_short", 3, 3, base=_READ, first=9, steps=4, past=20, beyond=0, seed=263),
    _low("read_int8_keys_int2_values", 8, 2, base=_READ, steps=2, past=95, seed=261),
]
_HALF = replace(_SOFTMAX, name="gates", gates=0.5)
# A mixture of heads: heads whose gate is 0 are not computed
GATED_CASES = [
    replace(_HALF, name="gates_decode", steps=1, past=90, heads=8, kv_heads=8, batch=3, beyond=3, seed=300),
    replace(_HALF, name="gates_long_decode", steps=1, past=700, heads=4, kv_heads=2, padding="left", batch=2, seed=301),
    replace(_HALF, name="gates_chunk", steps=4, past=300, heads=4, kv_heads=4, dtype=torch.float16, seed=302),
    replace(_HALF, name="gates_none", gates=0.0, steps=1, past=20, heads=4, kv_heads=4, beyond=2, seed=303),
    replace(_HALF, name="gates_all", gates=1.0, steps=1, past=20, heads=4, kv_heads=4, seed=304),
    replace(_HALF, name="gates_prompt", steps=70, past=5, heads=4, kv_heads=4, d=32, batch=2, seed=305),
    replace(_HALF, name="gates_few_prompt", gates=0.05, steps=150, heads=4, kv_heads=4, padding="left", seed=306),
    replace(_HALF, name="gates_none_prompt", gates=0.0, steps=40, past=30, heads=4, kv_heads=4, d=20, seed=307),
    replace(_HALF, name="gates_all_prompt", gates=1.0, steps=40, heads=8, kv_heads=2, dtype=torch.float16, seed=308),
    replace(_HALF, name="gates_window", sliding_window=20, steps=1, past=81, heads=4, kv_heads=4, beyond=0, seed=309),
    replace(_HALF, name="gates_window_prompt", sliding_window=20, steps=60, past=31, heads=4, kv_heads=2, seed=310),
    replace(_HALF, name="gates_read", query_only=True, steps=2, past=60, heads=4, kv_heads=4, batch=2, seed=311),
    replace(_HALF, name="gates_cache_fp16", cache=torch.float16, steps=1, past=99, heads=4, kv_heads=4, seed=312),
    _low("gates_int8_decode", 8, 8, base=_HALF, steps=1, past=290, beyond=1, heads=8, kv_heads=8, d=64, seed=313),
    _low("gates_int8_query8", 8, 8, 8, base=_HALF, steps=3, past=70, heads=4, kv_heads=4, batch=2, seed=314),
    _low("gates_int8_prompt", 8, 8, base=_HALF, steps=50, past=9, heads=4, kv_heads=4, padding="right", seed=315),
    _low("gates_int4_decode", 4, 4, base=_HALF, steps=1, past=127, beyond=40, heads=6, kv_heads=3, d=64, seed=316),
    _low("gates_int4_long", 4, 4, 8, base=_HALF, steps=1, past=700, heads=4, kv_heads=4, padding="left", seed=317),
    _low("gates_int4_prompt", 4, 4, base=_HALF, steps=130, past=40, heads=4, kv_heads=4, seed=318),
    _low("gates_int4_none_prompt", 4, 4, base=_HALF, gates=0.0, steps=70, past=40, heads=4, kv_heads=4, seed=319),
    _low("gates_int3_decode", 3, 3, base=_HALF, steps=1, past=159, beyond=1, heads=4, kv_heads=4, batch=2, seed=320),
    _low("gates_int2_decode", 2, 2, base=_HALF, steps=1, past=190, heads=4, kv_heads=4, batch=2, seed=321),
    _low("gates_int3_int2_prompt", 3, 2, base=_HALF, steps=60, past=33, heads=4, kv_heads=2, seed=322),
    _ring("gates_ring_int4", 4, 4, gates=0.5, steps=2, past=203, heads=4, kv_heads=4, beyond=0, seed=323),
    replace(_V1, name="gates_v1_decode", gates=0.5, steps=1, past=300, heads=8, kv_heads=8, d=16, batch=2, seed=324),
    replace(_V1, name="gates_v1_chunk", gates=0.5, steps=4, past=9, heads=4, kv_heads=4, beyond=2, seed=325),
    replace(_V1, name="gates_v1_prompt", gates=0.5, steps=45, past=9, heads=4, kv_heads=4, d=32, batch=2, seed=326),
    replace(_V2, name="gates_v2_prompt", gates=0.4, steps=45, heads=8, kv_heads=4, dtype=torch.float16, seed=327),
    replace(_V2, name="gates_v2_decode", gates=0.4, steps=1, past=33, heads=8, kv_heads=4, batch=2, seed=328),
    replace(_GROUPED, name="gates_grouped_decode", gates=0.3, steps=1, past=70, heads=16, batch=3, beyond=1, seed=329),
    replace(_GROUPED, name="gates_grouped_chunk", gates=0.3, steps=4, past=3, d=16, seed=330),
    replace(_GROUPED, name="gates_grouped_prompt", gates=0.3, noise_ratio=2, steps=40, past=3, batch=2, seed=331),
    _low("gates_grouped_int4", 4, 4, base=_GROUPED, gates=0.3, steps=3, past=99, beyond=3, d=64, seed=332),
    _low("gates_v1_int8_prompt", 8, 8, 8, base=_V1, gates=0.5, steps=30, past=9, heads=4, kv_heads=4, seed=333),
]
ATTENTION_CASES += RING_CASES + QUERY_ONLY_CASES + GATED_CASES

_BF16 = torch.bfloat16
# bfloat16, which CUDA alone has; what its decode kernel takes in tiles of 16 tokens and 8 rows: fractions of them,
# several splits of the context, 64, 128 and 256 channels
CUDA_ATTENTION_CASES = [
    replace(_V1, name="bf16_decode", steps=1, past=300, beyond=5, d=64, dtype=_BF16, seed=120),
    replace(_V1, name="bf16_first_token", steps=1, past=0, beyond=5, d=64, dtype=_BF16, seed=121),
    replace(_V1, name="bf16_sixteen", steps=1, past=16, d=64, dtype=_BF16, seed=122),
    replace(_V1, name="bf16_eight_steps_left", steps=8, past=71, d=64, dtype=_BF16, padding="left", batch=2, seed=124),
    replace(_V1, name="bf16_right", steps=2, past=64, d=64, dtype=_BF16, padding="right", batch=2, beyond=0, seed=125),
    replace(_V1, name="bf16_d128", steps=1, past=150, d=128, dtype=_BF16, beyond=3, seed=126),
    replace(_V1, name="bf16_gqa8_three_steps", steps=3, past=99, d=64, heads=8, dtype=_BF16, seed=127),
    replace(_V1, name="bf16_d80", steps=2, past=33, d=80, dtype=_BF16, seed=128),
    replace(_V1, name="bf16_cache_fp32", steps=2, past=33, d=64, dtype=_BF16, cache=torch.float32, seed=129),
    replace(_V1, name="fp16_cache_bf16", steps=2, past=33, d=64, dtype=torch.float16, cache=_BF16, seed=130),
    replace(_V1, name="fp16_d128_gqa2", steps=2, past=90, d=128, heads=4, kv_heads=4, dtype=torch.float16, seed=131),
    replace(_V1, name="fp32_cache_fp16_d128", steps=2, past=200, d=128, cache=torch.float16, beyond=1, seed=132),
    replace(_V2, name="v2_bf16_d128", steps=1, past=200, d=128, heads=4, kv_heads=2, dtype=_BF16, batch=2, seed=133),
    replace(_V2, name="v2_fp16_d256", steps=1, past=70, d=256, dtype=torch.float16, seed=134),
    replace(_SOFTMAX, name="softmax_bf16_gqa4", steps=1, past=130, d=64, heads=8, dtype=_BF16, beyond=9, seed=135),
    _low("int8_bf16_decode", 8, 8, steps=1, past=300, beyond=5, d=64, heads=4, dtype=_BF16, seed=136),
    _low("int8_first_token", 8, 8, steps=1, d=64, seed=137),
    _low("int8_d128_eight_steps", 8, 8, steps=8, past=77, d=128, padding="left", batch=2, seed=138),
    _low("int8_d128_gqa4", 8, 8, steps=1, past=150, d=128, heads=4, dtype=torch.float16, beyond=2, seed=139),
    _low("v2_int8_d128", 8, 8, base=_V2, steps=2, past=131, d=128, heads=4, kv_heads=2, dtype=_BF16, seed=140),
    _low("v2_int8_d64", 8, 8, base=_V2, steps=3, past=31, d=64, heads=8, kv_heads=2, beyond=0, seed=141),
    _low("int4_bf16", 4, 4, steps=3, past=95, d=64, dtype=_BF16, beyond=40, seed=142),
    _low("int4_fp16_decode", 4, 4, steps=1, past=460, d=64, dtype=torch.float16, beyond=40, batch=2, seed=143),
    _low("int4_fp16_gqa8_left", 4, 4, steps=2, past=190, d=64, heads=8, dtype=torch.float16, padding="left", seed=144),
    _low("int4_bf16_d128", 4, 4, steps=1, past=300, d=128, heads=4, kv_heads=4, dtype=_BF16, seed=145),
    _low("int4_bf16_window0", 4, 4, steps=5, past=92, d=64, window=0, dtype=_BF16, beyond=0, seed=146),
    _low("int3_bf16", 3, 3, steps=3, past=95, d=64, dtype=_BF16, beyond=40, seed=185),
    _low("int3_fp16_decode", 3, 2, 8, steps=1, past=460, d=64, dtype=torch.float16, batch=2, padding="left", seed=186),
    _low("int3_d128_first16", 3, 3, first=16, steps=1, past=300, d=128, heads=4, kv_heads=4, dtype=_BF16, seed=187),
    _low("int2_bf16_first0", 2, 2, first=0, steps=2, past=190, d=64, heads=8, dtype=_BF16, beyond=0, seed=188),
    _low("v2_int4_bf16_d128", 4, 4, base=_V2, steps=1, past=200, d=128, heads=4, kv_heads=2, dtype=_BF16, seed=147),
    replace(_GROUPED, name="grouped_bf16_d128", steps=1, past=150, d=128, dtype=_BF16, beyond=3, seed=149),
    # Prompts
    replace(
        _WINDOW, name="ring_d64", sliding_window=40, steps=150, past=70, d=64, heads=1, dtype=torch.float16, seed=290
    ),
    replace(
        _WINDOW, name="ring_short", sliding_window=7, steps=70, d=64, dtype=torch.float16, padding="left", seed=291
    ),
    replace(_V2, name="ring_v2_d128", sliding_window=90, steps=66, past=80, d=128, heads=3, dtype=_BF16, seed=292),
    replace(_READ, name="read_d64", steps=33, past=31, d=64, heads=4, kv_heads=4, dtype=torch.float16, seed=293),
    # Steps
    replace(_WINDOW, name="ring_bf16", sliding_window=70, steps=2, past=150, d=64, beyond=0, dtype=_BF16, seed=280),
    _ring("ring_int8_fast", 8, 8, steps=1, past=190, d=64, batch=2, padding="left", beyond=0, seed=281),
    _ring("ring_int4_fast", 4, 4, steps=2, past=190, d=64, dtype=_BF16, beyond=0, seed=282),
    replace(_READ, name="read_bf16", steps=2, past=50, d=64, dtype=_BF16, seed=283),
    _low("read_int4_fast", 4, 4, base=_READ, steps=1, past=130, d=64, dtype=_BF16, beyond=5, seed=284),
    _low("softmax_int4_fp16", 4, 4, base=_SOFTMAX, steps=1, past=290, d=64, dtype=torch.float16, seed=148),
    # A mixture of heads: blocks of which all rows are off, and others
    replace(_HALF, name="gates_bf16", steps=1, past=290, heads=8, kv_heads=8, d=64, dtype=_BF16, beyond=3, seed=340),
    replace(_HALF, name="gates_bf16_none", gates=0.0, steps=2, past=90, heads=2, d=64, dtype=_BF16, seed=341),
    replace(_HALF, name="gates_bf16_gqa", gates=0.2, steps=3, past=90, heads=16, d=64, dtype=_BF16, seed=342),
    _low("gates_int8_bf16", 8, 8, base=_HALF, steps=1, past=150, heads=8, kv_heads=4, d=128, dtype=_BF16, seed=343),
    _low("gates_int4_bf16", 4, 4, base=_HALF, steps=1, past=150, heads=8, kv_heads=8, d=64, dtype=_BF16, seed=344),
    replace(_V1, name="gates_v1_bf16", gates=0.4, steps=1, past=150, heads=8, kv_heads=16, d=64, dtype=_BF16, seed=345),
    replace(
        _GROUPED, name="gates_grouped_bf16", gates=0.2, heads=16, steps=1, past=99, d=64, dtype=_BF16, batch=2, seed=346
    ),
]

# Many tokens of 16 bits: blocks of 64 or 128 queries, steps of 32 keys, and their edges
_FP16 = torch.float16
PREFILL_CASES = [
    replace(_HALF, name="gates_d64", steps=300, past=33, heads=3, kv_heads=3, d=64, dtype=_BF16, seed=350),
    replace(_HALF, name="gates_d128", steps=140, heads=4, kv_heads=2, d=128, dtype=_FP16, batch=2, seed=351),
    replace(_HALF, name="gates_none_d64", gates=0.0, steps=70, heads=2, kv_heads=2, d=64, dtype=_FP16, seed=352),
    replace(_HALF, name="gates_all_d64", gates=1.0, steps=70, heads=2, kv_heads=2, d=64, dtype=_FP16, seed=353),
    replace(_V1, name="gates_v1_d64", gates=0.6, steps=250, past=9, d=64, dtype=_BF16, padding="left", seed=354),
    replace(_V2, name="gates_v2_d128", gates=0.3, steps=100, d=128, heads=3, dtype=_FP16, seed=355),
    replace(_GROUPED, name="gates_grouped_d64", gates=0.5, steps=80, d=64, heads=4, kv_heads=2, dtype=_BF16, seed=356),
    _low("gates_int4_d64", 4, 4, base=_HALF, steps=200, past=83, d=64, heads=2, dtype=_BF16, beyond=40, seed=357),
    _ring("gates_ring_d64", 8, 8, gates=0.5, sliding_window=40, steps=90, past=70, d=64, dtype=_FP16, seed=358),
    replace(_V1, name="v1_d64", steps=40, d=64, heads=1, dtype=_BF16, seed=150),
    replace(_V1, name="v1_d64_fp16", steps=9, past=5, d=64, heads=1, dtype=_FP16, seed=151),
    replace(_V1, name="v1_d64_past", steps=19, past=5, d=64, dtype=_BF16, seed=123),
    replace(_V1, name="v1_d64_two_blocks", steps=135, d=64, heads=1, dtype=_BF16, beyond=0, seed=152),
    replace(_V1, name="v1_d64_past_left", steps=33, past=31, d=64, batch=2, dtype=_FP16, padding="left", seed=153),
    replace(_V1, name="v1_d64_gqa4", steps=32, past=32, d=64, heads=8, kv_heads=4, dtype=_BF16, beyond=7, seed=154),
    replace(_V1, name="v1_d64_token_lambda", steps=17, d=64, token_lambda=True, norm_eps=0.0, dtype=_FP16, seed=155),
    replace(_V1, name="v1_d128", steps=17, d=128, heads=1, dtype=_FP16, seed=156),
    replace(_V1, name="v1_d128_two_blocks", steps=66, past=70, d=128, heads=1, dtype=_BF16, beyond=3, seed=157),
    replace(
        _V1, name="v1_d128_gqa2_right", steps=20, d=128, kv_heads=2, batch=2, dtype=_BF16, padding="right", seed=158
    ),
    replace(_GROUPED, name="grouped_d64", steps=33, past=5, d=64, heads=4, kv_heads=2, dtype=_BF16, seed=119),
    replace(_V2, name="v2_d64", steps=70, past=1, d=64, heads=4, kv_heads=2, dtype=_FP16, seed=159),
    replace(_V2, name="v2_d64_left", steps=35, d=64, batch=2, dtype=_BF16, padding="left", seed=160),
    replace(_V2, name="v2_d128", steps=65, past=60, d=128, heads=3, dtype=_BF16, beyond=4, seed=161),
    replace(_SOFTMAX, name="softmax_d64", steps=131, d=64, dtype=_BF16, seed=162),
    replace(_SOFTMAX, name="softmax_d128", steps=66, past=33, d=128, dtype=_FP16, batch=2, padding="left", seed=163),
    # Caches of another type, and of few bits: rows, and blocks that some queries see quantized and others not
    replace(_V1, name="bf16_cache_fp16_d64", steps=40, past=9, d=64, dtype=_BF16, cache=_FP16, beyond=3, seed=164),
    replace(_V2, name="fp16_cache_fp32_d128", steps=35, past=40, d=128, dtype=_FP16, cache=torch.float32, seed=165),
    _low("int8_d64", 8, 8, steps=135, past=37, d=64, heads=1, dtype=_FP16, beyond=6, seed=166),
    _low("int8_d128_left", 8, 8, base=_V2, steps=66, d=128, heads=3, dtype=_BF16, batch=2, padding="left", seed=167),
    _low("int8_softmax_d64", 8, 8, base=_SOFTMAX, steps=70, past=3, d=64, dtype=_BF16, padding="right", seed=168),
    _low("int8_ring_d64", 8, 8, base=_WINDOW, sliding_window=40, steps=90, past=70, d=64, dtype=_FP16, seed=169),
    _low("int4_d64", 4, 4, steps=150, d=64, heads=1, dtype=_FP16, seed=170),
    _low("int4_d64_past", 4, 4, steps=140, past=83, d=64, heads=1, dtype=_BF16, batch=2, beyond=40, seed=171),
    _low("int4_d64_recent", 4, 4, steps=33, past=50, d=64, heads=4, kv_heads=4, dtype=_FP16, seed=172),
    _low("int4_d64_window0", 4, 4, steps=96, past=32, d=64, heads=1, window=0, dtype=_FP16, padding="left", seed=173),
    _low("int4_d64_window75", 4, 4, steps=130, past=100, d=64, heads=1, window=75, dtype=_BF16, seed=174),
    _low("int4_d64_unsettled", 4, 4, steps=34, past=5, d=64, window=64, dtype=_FP16, seed=175),
    _low("int4_d128", 4, 4, steps=131, past=31, d=128, heads=1, dtype=_BF16, padding="right", seed=176),
    _low("int4_v2_d128", 4, 4, base=_V2, steps=70, past=64, d=128, heads=3, dtype=_FP16, beyond=0, seed=177),
    _low("int4_softmax_d128", 4, 4, base=_SOFTMAX, steps=66, past=190, d=128, dtype=_BF16, batch=2, seed=178),
    _low("int4_grouped_d64", 4, 4, base=_GROUPED, steps=65, past=5, heads=4, kv_heads=2, d=64, dtype=_BF16, seed=179),
    _low("int4_read_d64", 4, 4, base=_READ, steps=40, past=97, d=64, heads=4, kv_heads=4, dtype=_BF16, seed=180),
    _low("int4_ring_d64", 4, 4, base=_WINDOW, sliding_window=50, steps=150, past=203, d=64, dtype=_FP16, seed=181),
    _low("int4_ring_window70", 4, 4, base=_WINDOW, sliding_window=50, window=70, steps=90, d=64, dtype=_BF16, seed=182),
    _low("int2_d64", 2, 2, steps=100, past=33, d=64, heads=1, dtype=_FP16, seed=183),
    _low("int2_d128", 2, 2, base=_V2, steps=40, past=99, d=128, heads=3, dtype=_BF16, beyond=9, seed=184),
    _low("int3_d64", 3, 3, steps=100, past=33, d=64, heads=1, dtype=_FP16, batch=2, padding="left", seed=188),
    _low("int3_d128_first16", 3, 3, base=_V2, first=16, steps=90, past=9, d=128, heads=3, dtype=_BF16, seed=189),
    _low("int4_d64_first0", 4, 4, first=0, window=0, steps=70, past=64, d=64, dtype=_BF16, beyond=0, seed=190),
    _low("int3_ring_d64", 3, 2, base=_WINDOW, sliding_window=50, steps=90, past=120, d=64, dtype=_BF16, seed=191),
    _low("int4_keys_d64", 4, 16, steps=97, past=30, d=64, heads=1, dtype=_BF16, beyond=2, seed=185),
    _low("int4_keys_int8_values_d64", 4, 8, steps=97, past=70, d=64, dtype=_FP16, seed=186),
    _low("int2_values_d64", 16, 2, steps=97, past=70, d=64, cache=_FP16, dtype=_BF16, seed=187),
]


@dataclass(frozen=True)
class TernaryCase:
    """A call of TernaryMatMul: activations [*lead, K] times a ternary weight [N, K]."""

    name: str
    lead: tuple[int, ...] = (3,)
    k: int = 128
    n: int = 5
    # "ones", "minus": weights 1, activations at one end, the sums' extremes; "zero"; "tiny"; "outliers"
    fill: str = "normal"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    bits: int = 8  # of the activations
    per_row: bool = False  # a scale for each row of the weight

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, the weight in {-1, 0, 1} (int8, not packed) and its scale, or scales."""
        g = generator(self.seed)
        a = torch.randn(*self.lead, self.k, generator=g) * 3
        weight = torch.randint(-1, 2, (self.n, self.k), generator=g, dtype=torch.int8)
        if self.fill == "ones":
            a, weight = torch.full_like(a, 2.0), torch.ones_like(weight)
        elif self.fill == "minus":
            a, weight = torch.full_like(a, -2.0), torch.ones_like(weight)
        elif self.fill == "zero":
            a = torch.zeros_like(a)
        elif self.fill == "tiny":
            a = a * 1e-6
        elif self.fill == "outliers":
            a[..., ::50] *= -2000
        scale = torch.rand(self.n, generator=g) + 0.01 if self.per_row else torch.tensor([0.037])
        return a.to(self.dtype), weight, scale


TERNARY_CASES = [
    TernaryCase("one_block"),
    TernaryCase("one_row", lead=(1,), k=256, n=7, seed=1),
    TernaryCase("batched", lead=(2, 3), k=384, n=16, seed=2),
    TernaryCase("ragged", lead=(4,), k=200, n=3, seed=3),
    TernaryCase("short", lead=(2,), k=5, n=1, seed=4),
    TernaryCase("extreme_sums", lead=(1,), k=4096, n=2, fill="ones"),
    TernaryCase("extreme_tiles", lead=(13,), k=4096, n=21, fill="ones"),
    TernaryCase("lowest_sums", lead=(1,), k=4096, n=2, fill="minus"),
    TernaryCase("lowest_tiles", lead=(13,), k=4096, n=21, fill="minus"),
    TernaryCase("zero_rows", lead=(2,), fill="zero"),
    TernaryCase("tiny_rows", lead=(4,), fill="tiny", seed=7),
    TernaryCase("fp16", k=256, dtype=torch.float16, seed=5),
    TernaryCase("many_rows", lead=(65,), k=128, n=33, seed=6),
    # Every number of rows in a tile, and leftover weight rows and blocks
    *(TernaryCase(f"rows_{m}", lead=(m,), k=640, n=16 + m, seed=m) for m in range(1, 13)),
    TernaryCase("one_number", lead=(), k=1, n=1, seed=8),
    TernaryCase("one_past_a_block", lead=(2,), k=129, n=9, seed=9),
    TernaryCase("long_row", lead=(1,), k=33000, n=6, seed=10),
    TernaryCase("long_rows", lead=(7,), k=14336, n=10, seed=11),
    TernaryCase("wide", lead=(3,), k=300, n=1030, seed=12),
    TernaryCase("prefill", lead=(2, 150), k=512, n=259, seed=13),
    TernaryCase("prefill_fp16", lead=(200,), k=320, n=135, dtype=torch.float16, seed=14),
    TernaryCase("one_row_fp16", lead=(1,), k=515, n=301, dtype=torch.float16, seed=15),
    # Activations of four bits
    TernaryCase("int4", bits=4, seed=20),
    TernaryCase("int4_one_row", lead=(1,), k=700, n=300, bits=4, seed=21),
    TernaryCase("int4_ragged", lead=(2, 3), k=201, n=17, bits=4, seed=22),
    TernaryCase("int4_one_number", lead=(), k=1, n=1, bits=4, seed=23),
    TernaryCase("int4_ones", lead=(2,), k=4096, n=3, fill="ones", bits=4),
    TernaryCase("int4_outliers", lead=(3,), k=1500, n=40, fill="outliers", bits=4, seed=24),
    TernaryCase("int4_zero_rows", lead=(2,), fill="zero", bits=4),
    TernaryCase("int4_tiny_rows", lead=(4,), fill="tiny", bits=4, seed=25),
    TernaryCase("int4_fp16", lead=(7,), k=333, n=35, fill="outliers", bits=4, dtype=torch.float16, seed=26),
    TernaryCase("int4_long_row", lead=(1,), k=33000, n=6, bits=4, seed=27),
    TernaryCase("int4_prefill", lead=(150,), k=512, n=259, bits=4, seed=28),
    # A scale for each row, also beyond a panel's and a task's rows
    *(TernaryCase(f"per_row_{m}", lead=(m,), k=300, n=1030 + m, seed=60 + m, per_row=True) for m in (1, 2, 5, 40)),
    TernaryCase("per_row_one_number", lead=(), k=1, n=1, seed=65, per_row=True),
    TernaryCase("per_row_one_dimension", lead=(), k=129, n=6, seed=66, per_row=True),
    TernaryCase("per_row_fp16", lead=(2, 3), k=515, n=301, dtype=torch.float16, seed=67, per_row=True),
    TernaryCase("per_row_int4", lead=(1,), k=700, n=300, bits=4, seed=68, per_row=True),
    TernaryCase("per_row_int4_prefill", lead=(150,), k=512, n=259, bits=4, seed=69, per_row=True),
]


@dataclass(frozen=True)
class HadamardCase:
    """A call of Hadamard: A [*lead, K] in blocks."""

    name: str
    lead: tuple[int, ...] = (3,)
    k: int = 128
    block: int = 128
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> torch.Tensor:
        """A, with an outlier in each row."""
        a = torch.randn(*self.lead, self.k, generator=generator(self.seed))
        a[..., self.k // 2] *= 100
        return a.to(self.dtype)


HADAMARD_CASES = [
    *(HadamardCase(f"block_{1 << i}", lead=(2,), k=3 << i, block=1 << i, seed=i) for i in range(14)),
    *(HadamardCase(f"block_{1 << i}_fp16", k=3 << i, block=1 << i, dtype=torch.float16, seed=i) for i in range(10)),
    HadamardCase("one_block", lead=(1,), seed=20),
    HadamardCase("no_lead", lead=(), k=64, block=64, seed=21),
    HadamardCase("batched", lead=(2, 5), k=192, block=64, seed=22),
    HadamardCase("small_blocks", lead=(7,), k=6, block=2, seed=23),
    HadamardCase("prefill", lead=(150,), k=768, block=256, seed=24),
    HadamardCase("prefill_fp16", lead=(150,), k=512, block=512, dtype=torch.float16, seed=25),
    HadamardCase("long", lead=(1,), k=1 << 16, block=1 << 16, seed=26),
]


@dataclass(frozen=True)
class SiluGateCase:
    """A call of SiluGate: A [*lead, 2 n]."""

    name: str
    lead: tuple[int, ...] = (3,)
    n: int = 64
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> torch.Tensor:
        """A, with gates whose exponential overflows and whose SiLU vanishes."""
        a = torch.randn(*self.lead, 2 * self.n, generator=generator(self.seed)) * 3
        for at, gate in enumerate((200.0, -200.0, 0.0, -20.0)[: self.n]):
            a[..., at] = gate
        return a.to(self.dtype)


SILU_GATE_CASES = [
    *(SiluGateCase(f"n_{n}", n=n, seed=n) for n in (1, 3, 16, 17, 63, 1536)),
    *(SiluGateCase(f"n_{n}_fp16", n=n, dtype=torch.float16, seed=n) for n in (1, 5, 16, 31, 100)),
    SiluGateCase("no_lead", lead=(), n=24, seed=30),
    SiluGateCase("batched", lead=(2, 5), n=40, seed=31),
    SiluGateCase("prefill", lead=(70,), n=515, seed=32),
    SiluGateCase("wide", lead=(1,), n=40_000, seed=33),
]


@dataclass(frozen=True)
class Int4Case:
    """A call of Int4MatMul, or of Int8MatMul: activations [*lead, K] times a low-bit weight [N, K] in groups."""

    name: str
    lead: tuple[int, ...] = (3,)
    k: int = 128
    n: int = 32
    group: int = 32
    symmetric: bool = True
    factor: float = 1.0
    # "low", "high": codes and activations at their ends; "far": zero points up to 255; "zero"; "tiny"; "huge"; "wild":
    # inf, NaN
    fill: str = "normal"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    bits: int = 4
    row_scale: bool = False  # one scale and zero point for a row

    @property
    def op(self) -> ModuleType:
        return int4_matmul if self.bits == 4 else int8_matmul

    def packed(self) -> int4_matmul.TiledWeight:
        _, codes, scale, zero, _ = self.inputs()
        return int4_matmul.pack(codes, scale, zero, self.group, self.bits)

    def attributes(self) -> dict[str, int | float]:
        return {"K": self.k, "N": self.n, "group_size": self.group, "spec_version": self.op.OP.version}

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """A, codes uint8 [N, K], scales [N, G] that float16 holds, zero points uint8 [N, G] or None, the factor."""
        g = generator(self.seed)
        groups, top = 1 if self.row_scale else -(-self.k // self.group), 2**self.bits - 1
        a = torch.randn(*self.lead, self.k, generator=g) * 3
        codes = torch.randint(0, top + 1, (self.n, self.k), generator=g, dtype=torch.uint8)
        scale = (torch.randn(self.n, groups, generator=g) * 0.1).half().float()
        zero = torch.randint(0, top + 1, (self.n, groups), generator=g, dtype=torch.uint8)
        if self.fill in ("low", "high"):
            a, low = torch.full_like(a, -2.0), self.fill == "low"
            codes, zero = torch.full_like(codes, 0 if low else top), torch.full_like(zero, top if low else 0)
        elif self.fill == "far":
            zero = torch.randint(0, 256, zero.shape, generator=g, dtype=torch.uint8)
        elif self.fill == "zero":
            a = torch.zeros_like(a)
            a[..., ::97] = -0.0
        elif self.fill == "tiny":
            a = a * torch.tensor(10.0) ** torch.linspace(-45, -25, self.k)
        elif self.fill == "huge":
            a = a * 1e35
        elif self.fill == "wild":
            a[0, 7], a[1, self.k - 1], a[2, 40] = torch.inf, torch.nan, -torch.inf
        return a.to(self.dtype), codes, scale, None if self.symmetric else zero, torch.tensor([self.factor])


INT4_CASES = [
    Int4Case("small"),
    Int4Case("one_row", lead=(1,), k=256, n=144, seed=1),
    Int4Case("one_row_asymmetric", lead=(1,), k=256, n=144, symmetric=False, seed=2),
    Int4Case("batched", lead=(2, 3), k=384, n=48, group=64, seed=3),
    Int4Case("ragged", lead=(4,), k=200, n=37, seed=4),
    Int4Case("ragged_asymmetric", lead=(7,), k=328, n=100, group=64, symmetric=False, seed=5),
    Int4Case("short", lead=(2,), k=5, n=1, group=128, seed=6),
    Int4Case("odd_k", lead=(9,), k=131, n=17, group=128, symmetric=False, seed=7),
    Int4Case("low_codes", lead=(5,), k=1024, n=16, fill="low"),
    Int4Case("high_codes", lead=(1,), k=1024, n=64, fill="high"),
    Int4Case("high_codes_g128", lead=(9,), k=1024, n=64, group=128, fill="high"),
    Int4Case("low_codes_asymmetric", lead=(9,), k=512, n=16, group=128, symmetric=False, fill="low"),
    Int4Case("zero_rows", lead=(2,), fill="zero"),
    Int4Case("tiny_rows", lead=(4,), k=512, fill="tiny", seed=8),
    Int4Case("huge_rows", lead=(4,), k=96, fill="huge", seed=9),
    Int4Case("wild_rows", lead=(5,), k=96, fill="wild", seed=10),
    Int4Case("factor", lead=(3,), factor=0.8 - 0.6 * 0.7408, seed=11),
    Int4Case("fp16", lead=(6,), k=256, dtype=torch.float16, seed=12),
    Int4Case("fp16_ragged", lead=(1,), k=200, n=21, symmetric=False, factor=0.37, dtype=torch.float16, seed=13),
    Int4Case("many_rows", lead=(65,), k=160, n=80, seed=14),
    Int4Case("many_rows_asymmetric", lead=(131,), k=320, n=150, group=64, symmetric=False, seed=15),
    Int4Case("long", lead=(2,), k=4096, n=32, seed=16),
    *(Int4Case(f"rows_{m}", lead=(m,), k=136, n=200, factor=0.9, seed=20 + m) for m in range(2, 18)),
    *(Int4Case(f"rows_{m}_asymmetric", lead=(m,), n=136, symmetric=False, seed=40 + m) for m in range(2, 10)),
]

INT8_CASES = [
    Int4Case("int8", bits=8),
    Int4Case("int8_one_row", lead=(1,), k=256, n=144, bits=8, seed=1),
    Int4Case("int8_row_scale", lead=(1,), k=200, n=300, bits=8, row_scale=True, factor=0.37, seed=2),
    Int4Case("int8_row_scale_asymmetric", lead=(9,), k=200, n=37, symmetric=False, bits=8, row_scale=True, seed=3),
    Int4Case("int8_ragged", lead=(2, 2), k=201, n=37, group=64, bits=8, seed=4),
    Int4Case("int8_asymmetric", lead=(7,), k=328, n=100, group=128, symmetric=False, bits=8, seed=5),
    Int4Case("int8_low_codes", lead=(1,), k=1024, n=64, group=128, bits=8, fill="low"),
    Int4Case("int8_high_codes", lead=(9,), k=1024, n=64, group=128, bits=8, fill="high"),
    Int4Case("int8_low_codes_asymmetric", lead=(5,), k=512, n=16, symmetric=False, bits=8, fill="low"),
    Int4Case("int8_wild_rows", lead=(5,), k=96, bits=8, fill="wild", seed=6),
    Int4Case("int8_zero_rows", lead=(2,), bits=8, fill="zero"),
    Int4Case("int8_fp16", lead=(6,), k=256, dtype=torch.float16, bits=8, row_scale=True, seed=7),
    *(Int4Case(f"int8_rows_{m}", lead=(m,), k=136, n=200, bits=8, row_scale=True, seed=80 + m) for m in range(2, 18)),
    *(Int4Case(f"int8_rows_{m}_asymmetric", lead=(m,), n=136, symmetric=False, bits=8, seed=90 + m) for m in (2, 5, 8)),
    Int4Case("int8_many_rows", lead=(65,), k=160, n=80, bits=8, seed=14),
]

TABLE_CASES = [  # of GatherQuantized
    Int4Case(f"{bits}_bits_{k}x{n}{'' if symmetric else '_asymmetric'}", (2, 3), k, n, group, symmetric, **more)
    for bits in (4, 8)
    for k, n, group, symmetric, more in (
        (128, 40, 32, True, {}),
        (201, 33, 64, False, {"factor": 1.5}),
        (130, 17, 128, True, {"dtype": torch.float16}),
        (200, 16, 32, bits == 4, {"row_scale": bits == 8}),
    )
    for more in ({**more, "bits": bits, "seed": k},)
]


@dataclass(frozen=True)
class LowBitCase(Int4Case):
    """A call of LowBitMatMul: the codes and activations of Int4Case, scales of either kind, with a table or without."""

    table: bool = False
    int8_scales: bool = True
    doubled: bool = False  # levels are odd numbers
    trellis: bool = False  # trellis codes of any map and levels

    def packed(self) -> lowbit_matmul.LowBitWeight:
        return lowbit_matmul.pack(*self.weight(), self.group, self.bits)

    def attributes(self) -> dict[str, int | float]:
        values = {"K": self.k, "N": self.n, "group_size": self.group, "bits": self.bits}
        return lowbit_matmul.OP.attributes_of(values)

    def weight(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Codes uint8 [N, K], scales [N, G], scales of rows [N, 1] or None, the operator's levels or None."""
        _, codes, scale, _, _ = self.inputs()
        g = generator(self.seed + 1)
        levels = torch.randint(256, (2**self.bits,), generator=g, dtype=torch.uint8)
        levels[0], levels[-1] = 0, 255
        if self.trellis:
            levels = torch.randint(128, (trellis.levels_size(self.bits),), generator=g, dtype=torch.uint8)
            levels[-trellis.MAP :] &= 2 ** trellis.SUBSET_BITS[self.bits] - 1
        if self.doubled:
            levels = (128 + 1 - 2**self.bits + 2 * torch.arange(2**self.bits)).to(torch.uint8)
        row_scale = None
        if self.int8_scales:
            scale = torch.randint(-128, 128, scale.shape, generator=g).to(torch.int8)
            row_scale = (torch.randn(self.n, 1, generator=g) * 1e-3).half()
        return codes, scale, row_scale, levels if self.table else None


LOWBIT_KINDS = ((1, True), (2, False), (3, False), (4, False), (5, False), (6, False), (2, True), (3, True), (4, True))
LOWBIT_CASES = [
    LowBitCase(
        f"{bits}_bits{'_table' if table else ''}_{name}", bits=bits, table=table, seed=7 * bits + len(name), **more
    )
    for bits, table in LOWBIT_KINDS
    for name, more in (
        ("small", {}),
        ("one_row", {"lead": (1,), "k": 256, "n": 144}),
        ("float16_scales", {"lead": (5,), "k": 256, "n": 48, "int8_scales": False, "factor": 0.37}),
        ("ragged", {"lead": (2, 2), "k": 201, "n": 37, "group": 64, "factor": 0.9}),
        ("short", {"lead": (2,), "k": 5, "n": 1, "group": 128}),
        ("low_codes", {"lead": (1,), "k": 1024, "n": 64, "fill": "low"}),
        ("high_codes", {"lead": (9,), "k": 1024, "n": 64, "group": 128, "fill": "high"}),
        ("wild_rows", {"lead": (5,), "k": 96, "fill": "wild"}),
        ("fp16", {"lead": (6,), "k": 256, "dtype": torch.float16}),
        *((f"rows_{m}", {"lead": (m,), "k": 136, "n": 100, "int8_scales": m % 2 == 0}) for m in (2, 3, 4, 7, 8, 17)),
        ("many_rows", {"lead": (65,), "k": 160, "n": 80}),
    )
]

LOWBIT_CASES += [
    replace(case, name=case.name.replace("table", "doubled"), doubled=True)
    for case in LOWBIT_CASES
    if case.table and case.bits < 4
]

TRELLIS_CASES = [
    LowBitCase(f"trellis_{bits}_bits_{name}", bits=bits, table=True, trellis=True, seed=bits + len(name), **more)
    for bits in range(2, 7)
    for name, more in (
        ("one_row", {"lead": (1,), "k": 96, "n": 64}),
        ("ragged", {"lead": (2, 2), "k": 201, "n": 192, "group": 64, "factor": 0.9}),
        ("short", {"lead": (2,), "k": 5, "n": 64, "group": 128, "int8_scales": False}),
        ("fp16", {"lead": (3,), "k": 160, "n": 128, "dtype": torch.float16}),
        ("five_rows", {"lead": (5,), "k": 64, "n": 192}),
        ("many_rows", {"lead": (65,), "k": 160, "n": 320}),
    )
]
LOWBIT_CASES += TRELLIS_CASES

for _cases in (INT4_CASES, INT8_CASES, LOWBIT_CASES):  # the same with as many rows as matrix instructions are used for
    _few = [case for case in _cases if math.prod(case.lead) in (5, 6, 9)]
    _cases += [replace(case, name=f"{case.name}_25_and_more", lead=(5 * case.lead[0], *case.lead[1:])) for case in _few]

LOWBIT_TABLE_CASES = [  # of GatherLowBit
    LowBitCase(
        f"{bits}_bits{'_levels' if table else ''}_{k}x{n}", (2, 3), k, n, group, seed=k, bits=bits, table=table, **more
    )
    for bits, table in LOWBIT_KINDS
    for k, n, group, more in (
        (128, 40, 32, {"int8_scales": False}),
        (201, 33, 64, {"factor": 1.5}),
        (130, 17, 128, {"dtype": torch.float16}),
    )
]
LOWBIT_TABLE_CASES += [
    LowBitCase(f"trellis_{bits}_bits_table", (2, 3), 201, 192, 32, seed=bits, bits=bits, table=True, trellis=True)
    for bits in range(2, 7)
]


@dataclass(frozen=True)
class MambaCase:
    """A call of CausalConv, `width` tokens wide, or of SelectiveScan, with so many `states` for each channel."""

    name: str
    batch: int = 1
    steps: int = 5
    before: int = 0  # tokens before these, whose states are random
    channels: int = 8
    width: int = 4
    states: int = 4
    padding: tuple[int, ...] = ()  # places of the batch's first row, among all tokens
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def mask(self) -> torch.Tensor:
        mask = torch.ones(self.batch, self.before + self.steps, dtype=torch.int64)
        mask[:1, list(self.padding)] = 0
        return mask

    def real(self) -> torch.Tensor | None:
        """As references take it."""
        return self.mask()[:, self.before :].bool() if self.padding else None

    def conv(self) -> dict[str, torch.Tensor]:
        g = generator(self.seed)
        return {
            "x": torch.randn(self.batch, self.steps, self.channels, generator=g).to(self.dtype),
            "weight": torch.randn(self.width, self.channels, generator=g),
            "bias": torch.randn(self.channels, generator=g),
            "attention_mask": self.mask(),
            "past_state": torch.randn(self.batch, self.width - 1, self.channels, generator=g) * bool(self.before),
        }

    def conv_reference(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64, or as a model has it."""
        x, weight, bias, _, past = self.conv().values()
        return causal_conv.reference(x.to(dtype or x.dtype), weight, bias, past, self.real())

    def scan(self) -> dict[str, torch.Tensor]:
        """Step sizes from 1e-4 to 20, decays from 1 to none."""
        g = generator(self.seed)
        shape, low = (self.batch, self.steps, self.channels), (self.batch, self.steps, self.states)
        return {
            "x": torch.randn(shape, generator=g).to(self.dtype),
            "dt": (torch.randn(shape, generator=g) * 3).to(self.dtype),
            "z": (torch.randn(shape, generator=g) * 4).to(self.dtype),
            "B": torch.randn(low, generator=g).to(self.dtype),
            "C": torch.randn(low, generator=g).to(self.dtype),
            "A": -torch.rand(self.states, self.channels, generator=g) * 4 - 1e-3,
            "D": torch.randn(self.channels, generator=g),
            "dt_bias": torch.randn(self.channels, generator=g) * 2 - 2,
            "attention_mask": self.mask(),
            "past_state": torch.randn(self.batch, self.states, self.channels, generator=g) * bool(self.before),
        }

    def scan_reference(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y, memory and present_state; as conv_reference."""
        x, *others, dt_bias, _, past = self.scan().values()
        return selective_scan.reference(x.to(dtype or x.dtype), *others, past, dt_bias, self.real())


MAMBA_CASES = [
    MambaCase("prompt"),
    MambaCase("one_token", steps=1, before=3, channels=40, states=16, seed=1),
    MambaCase("first_token", steps=1, channels=33, states=16, seed=2),
    MambaCase("two_tokens", steps=2, before=1, channels=5, width=5, states=1, seed=3),
    MambaCase("padding_in_front", batch=2, steps=9, channels=17, states=5, padding=(0, 1, 2), seed=4),
    MambaCase("padding_behind", batch=3, steps=7, before=2, channels=16, padding=(6, 7, 8), seed=5),
    MambaCase("padding_between", batch=2, steps=12, before=4, channels=20, width=3, padding=(1, 3, 5, 6, 9), seed=6),
    MambaCase("padding_alone", steps=3, before=5, padding=(5, 6, 7), seed=7),
    MambaCase("padded_token", batch=2, steps=1, before=5, padding=(5,), seed=8),
    MambaCase("one_channel", steps=4, before=1, channels=1, width=2, states=2, seed=9),
    MambaCase("many_channels", steps=3, before=1, channels=1300, states=16, seed=10),
    MambaCase("long", steps=70, channels=70, states=16, seed=11),
    MambaCase("long_padded", batch=2, steps=65, channels=24, states=7, padding=(0, 20, 21, 64), seed=12),
    MambaCase("wide", steps=20, before=1, channels=9, width=9, states=64, seed=13),
    MambaCase("fp16", steps=6, before=2, channels=48, states=16, dtype=torch.float16, seed=14),
    MambaCase("fp16_token", batch=2, steps=1, before=2, channels=19, states=3, dtype=torch.float16, seed=15),
    MambaCase("fp16_padded", batch=2, steps=40, channels=21, padding=(0, 1, 7), dtype=torch.float16, seed=16),
]
