"""One table of cases for every implementation of an op: torch reference, ONNX body, and each kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


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
    cache: torch.dtype | None = None  # None: as dtype
    seed: int = 0

    def inputs(self) -> dict[str, torch.Tensor]:
        """Random inputs in the op's order; every float in the buffers beyond `past` is poisoned with NaN."""
        g = torch.Generator().manual_seed(self.seed)
        total = self.past + self.steps
        capacity = self.past if self.beyond is None else total + self.beyond

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(self.dtype)

        def cache() -> torch.Tensor:
            if self.cache == torch.int8:
                return torch.randint(-127, 128, (self.batch, self.kv_heads, capacity, self.d), generator=g).to(
                    self.cache
                )
            buffer = torch.full(
                (self.batch, self.kv_heads, capacity, self.d), float("nan"), dtype=self.cache or self.dtype
            )
            buffer[:, :, : self.past] = normal(self.batch, self.kv_heads, self.past, self.d)
            return buffer

        def scale() -> torch.Tensor:
            buffer = torch.full((self.batch, self.kv_heads, capacity), float("nan"))
            buffer[:, :, : self.past] = torch.rand(self.batch, self.kv_heads, self.past, generator=g) * 0.02
            return buffer

        mask = torch.ones(self.batch, total, dtype=torch.int64)
        if self.padding == "left":
            mask[0, :3] = 0
        elif self.padding == "right":
            mask[0, -2:] = 0
        angles = torch.arange(total + 3)[:, None] * 0.7 ** torch.arange(self.d // 2)
        lam_shape = (self.batch, self.steps, self.heads) if self.token_lambda else (self.heads,)
        inputs = {
            "query": normal(self.batch, self.steps, 2 * self.heads * self.d) * 2,
            "key": normal(self.batch, self.steps, self.kv_heads * self.d) * 2,
            "value": normal(self.batch, self.steps, self.kv_heads * self.d),
            "lambda": torch.rand(lam_shape, generator=g),
            "past_key": cache(),
            "past_value": cache(),
            "past_length": torch.tensor([self.past]),
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, self.past :],
            "cos": angles.cos(),
            "sin": angles.sin(),
            "attention_mask": mask,
        }
        if self.cache == torch.int8:
            inputs["key"][0, 0, : self.d] = 0  # a row of zeros has no step
            inputs |= {"past_key_scale": scale(), "past_value_scale": scale()}
        return inputs

    def attributes(self) -> dict[str, int | float]:
        """The node's attributes."""
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "wide_value": int(self.wide_value),
            "scale": 1 / math.sqrt(self.d),
            "norm_eps": self.norm_eps,
            "spec_version": 1,
        }


_V1 = AttentionCase("v1_prefill")
_V2 = replace(_V1, name="v2_prefill", kv_heads=1, wide_value=False, norm_eps=0.0, token_lambda=True)
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
    replace(_V1, name="v1_int8", cache=torch.int8, seed=35),
    replace(_V1, name="v1_int8_decode", cache=torch.int8, steps=1, past=300, beyond=5, d=64, heads=4, seed=36),
    replace(_V1, name="v1_int8_prefill", cache=torch.int8, steps=40, past=7, beyond=2, d=20, heads=1, seed=37),
    replace(_V1, name="v1_int8_fp16", cache=torch.int8, dtype=torch.float16, steps=2, past=30, d=36, batch=2, seed=38),
    replace(_V1, name="v1_int8_left", cache=torch.int8, steps=5, past=9, padding="left", batch=2, beyond=0, seed=39),
    replace(_V2, name="v2_int8_decode", cache=torch.int8, steps=1, past=70, beyond=1, heads=4, d=32, seed=40),
    replace(_V2, name="v2_int8_prefill", cache=torch.int8, steps=20, heads=3, d=16, seed=41),
]


@dataclass(frozen=True)
class TernaryCase:
    """A call of TernaryMatMul: activations [*lead, K] times a ternary weight [N, K]."""

    name: str
    lead: tuple[int, ...] = (3,)
    k: int = 128
    n: int = 5
    fill: str = "normal"  # "ones", "minus": weights 1, activations at one end, the sums' extremes; "zero"; "tiny"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, the weight in {-1, 0, 1} (int8, not packed) and its scale."""
        g = torch.Generator().manual_seed(self.seed)
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
        return a.to(self.dtype), weight, torch.tensor([0.037])


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
]


@dataclass(frozen=True)
class Int4Case:
    """A call of Int4MatMul: activations [*lead, K] times a 4-bit weight [N, K] in groups."""

    name: str
    lead: tuple[int, ...] = (3,)
    k: int = 128
    n: int = 32
    group: int = 32
    symmetric: bool = True
    factor: float = 1.0
    fill: str = "normal"  # "low", "high": codes and activations at their ends; "zero"; "tiny"; "huge"; "wild": inf, NaN
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """A, codes uint8 [N, K], scales [N, G] that float16 holds, zero points uint8 [N, G] or None, the factor."""
        g = torch.Generator().manual_seed(self.seed)
        groups = -(-self.k // self.group)
        a = torch.randn(*self.lead, self.k, generator=g) * 3
        codes = torch.randint(0, 16, (self.n, self.k), generator=g, dtype=torch.uint8)
        scale = (torch.randn(self.n, groups, generator=g) * 0.1).half().float()
        zero = torch.randint(0, 16, (self.n, groups), generator=g, dtype=torch.uint8)
        if self.fill in ("low", "high"):
            a, low = torch.full_like(a, -2.0), self.fill == "low"
            codes, zero = torch.full_like(codes, 0 if low else 15), torch.full_like(zero, 15 if low else 0)
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
