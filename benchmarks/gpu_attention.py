"""A layer of differential attention on a device: inputs, what must come out, and what it costs at least.

Costs. A token of the past and a pair of heads are 4d numbers: two keys and two values (a wide one) of d. Decoding reads
them once for both softmaxes, so the fewest bytes are

    16 bits    8 d                      8 bits   4 d + 4 steps of 4 bytes
    4 bits     2 d + keys: 2 grids of 4 bytes a channel and 32 tokens, values: 2 of 4 bytes a 32 channels

for each token and pair. A prompt of S tokens sees S (S + 1) / 2 pairs of places; each costs 2 products with keys of d
and 2 with values of 2d, a multiplication and an addition a number: 4 d + 8 d = 12 d operations a pair of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffbit.ops import diff_attention, kv_cache

WINDOW = 32  # recent tokens that a cache of grids keeps
BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
CHECKED = 64  # of a prompt's queries
SIDES = ("key", "value")


def flops(pairs: int, d: int, steps: int) -> float:
    """Of a causal prompt; see the module's docstring."""
    return 12.0 * d * pairs * steps * (steps + 1) / 2


@dataclass
class Layer:
    """`steps` new tokens behind `past`; `kind` is the cache's. Keys and values are of unit variance, as are queries.

    The buffers have room for all tokens, so past and present are one memory. Where tokens settle (4 bits) the call does
    so each time it is made: `past` is chosen by the caller so that it does not.
    """

    kind: str
    pairs: int
    kv_pairs: int
    d: int
    past: int
    steps: int
    device: str
    seed: int = 0
    eps: float = 1e-5
    inputs: dict[str, Tensor] = field(init=False)
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        self.dtype = torch.float16 if self.kind == "fp16" else torch.bfloat16
        heads, total = 2 * self.kv_pairs, self.total

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

        angles = torch.arange(total, device=self.device)[:, None] * 10000.0 ** (
            -torch.arange(self.d // 2, device=self.device) / (self.d // 2)
        )
        self.inputs = {
            "query": normal(1, self.steps, 2 * self.pairs * self.d),
            "key": normal(1, self.steps, heads * self.d),
            "value": normal(1, self.steps, heads * self.d),
            "lambda": torch.rand(self.pairs, generator=generator, device=self.device),
            "position_ids": torch.arange(self.past, total, device=self.device)[None],
            "cos": angles.cos(), "sin": angles.sin(),
            "attention_mask": torch.ones(1, total, dtype=torch.int64, device=self.device),
        }  # fmt: skip
        for side in SIDES:
            for name, tensor in self._cache(side, normal).items():
                self.inputs[name] = tensor
        self.out = torch.full((1, self.steps, 2 * self.pairs * self.d), float("nan"), dtype=self.dtype,
                              device=self.device)  # fmt: skip

    def _cache(self, side: str, normal: object) -> dict[str, Tensor]:
        """Buffers with room for all tokens. Low-bit ones are made of random numbers, a head at a time."""
        assert callable(normal)
        bits, heads, name = BITS[self.kind], 2 * self.kv_pairs, f"past_{side}"
        if bits == 16:
            return {name: normal(1, heads, self.total, self.d)}
        rows = [normal(1, 1, self.total, self.d, dtype=torch.float16) for _ in range(heads)]
        if bits == 8:
            made = [kv_cache.round_rows(row) for row in rows]
            return {name: torch.cat([codes for codes, _ in made], 1),
                    f"{name}_scale": torch.cat([steps for _, steps in made], 1)}  # fmt: skip
        count = kv_cache.settled(self.total, WINDOW)
        before = kv_cache.settled(self.past, WINDOW)
        rounded = kv_cache.round_keys if side == "key" else kv_cache.round_values
        made = [rounded(row[:, :, :count], bits) for row in rows]
        recent = torch.zeros(1, heads, WINDOW + kv_cache.GROUP, self.d, dtype=torch.float16, device=self.device)
        recent[:, :, : self.past - before] = torch.cat([row[:, :, before : self.past] for row in rows], 1)
        return {name: torch.cat([kv_cache.pack(codes, bits) for codes, _ in made], 1),
                f"{name}_scale": torch.cat([grids for _, grids in made], 1), f"{name}_recent": recent}  # fmt: skip

    @property
    def total(self) -> int:
        return self.past + self.steps

    @property
    def attributes(self) -> dict[str, int | float]:
        bits = BITS[self.kind]
        return {
            "num_heads": self.pairs, "num_kv_heads": 2 * self.kv_pairs, "branches": 2, "wide_value": 1,
            "scale": 1 / math.sqrt(self.d), "norm_eps": self.eps, "key_bits": bits, "value_bits": bits, "query_bits": 0,
            "window": WINDOW, "spec_version": diff_attention.VERSION,
        }  # fmt: skip

    @property
    def cache_bytes(self) -> int:
        """That one decoded token must read: of the cache, what holds tokens."""
        per_pair = {16: 8 * self.d, 8: 4 * self.d + 16, 4: 2 * self.d + self.d // 32 * 8 + 2 * self.d * 4 // 32}
        bits = BITS[self.kind]
        if bits != 4:
            return per_pair[bits] * self.total * self.kv_pairs
        count = kv_cache.settled(self.total, WINDOW)
        return (per_pair[4] * count + 8 * self.d * (self.total - count)) * self.kv_pairs

    def held(self, side: str, head: int) -> Tensor:
        """The numbers float32 [T, d] that the cache holds for one sub-head, all of them: after the call."""
        bits, buffer = BITS[self.kind], self.inputs[f"past_{side}"][:, head]
        if bits == 16:
            return buffer[0, : self.total].float()
        scale = self.inputs[f"past_{side}_scale"][:, head]
        if bits == 8:
            return buffer[0].float() * scale[0, :, None]
        count = kv_cache.settled(self.total, WINDOW)
        restore = kv_cache.restore_keys if side == "key" else kv_cache.restore_values
        groups = count // kv_cache.GROUP if side == "key" else count
        old = restore(kv_cache.unpack(buffer[:, :count], bits), scale[:, :groups])[0]
        return torch.cat((old, self.inputs[f"past_{side}_recent"][0, head, : self.total - count].float()))

    def rotated(self) -> Tensor:
        """The queries, float64 [S, 2 pairs, d], rotated."""
        x = self.inputs["query"][0].double().view(self.steps, 2 * self.pairs, self.d)
        cos, sin = (self.inputs[name][self.past :].double()[:, None] for name in ("cos", "sin"))
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def attended(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """What comes out for the tokens `rows` [n]: [n, pairs, 2d] float64; multiplied in `dtype`.

        In float64 it is the oracle; in the layer's own type the reference of the same precision: operands, shares of
        the softmax and products rounded to it, sums and the norm in float32 or wider, as torch does.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        queries = self.rotated()[rows] * self.attributes["scale"]
        places = torch.arange(self.total, device=self.device)
        hidden = places > self.past + rows[:, None]
        lam = self.inputs["lambda"].to(wide)
        out = []
        for pair in range(self.pairs):
            group = pair * self.kv_pairs // self.pairs
            values = torch.cat([self.held("value", 2 * group + i) for i in range(2)], -1).to(dtype)
            parts = []
            for branch in range(2):
                keys = self.held("key", 2 * group + branch).to(dtype)
                scores = (queries[:, 2 * pair + branch].to(dtype) @ keys.T).to(wide).masked_fill(hidden, -torch.inf)
                parts.append((torch.softmax(scores, -1).to(dtype) @ values).to(wide))
            difference = parts[0] - lam[pair] * parts[1]
            out.append(difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + self.eps))
        return torch.stack(out, 1).to(self.dtype if dtype != torch.float64 else dtype).double()

    def error(self) -> tuple[float, float]:
        """The largest error of `out`, and what is allowed: twice that of torch in the same precision, and a rounding.

        NaN is infinitely wrong.
        """
        rows = torch.arange(self.steps, device=self.device)
        if self.steps > CHECKED:
            some = torch.randperm(self.steps, device=self.device)[: CHECKED - 2]
            rows = torch.cat((some, rows[:1], rows[-1:]))
        wanted = self.attended(rows, torch.float64)
        got = self.out[0, rows].double().view(wanted.shape)
        if got.isnan().any() or self.out.isnan().any():
            return math.inf, 0.0
        plain = self.attended(rows, torch.float32 if BITS[self.kind] < 16 else self.dtype)
        rounding = torch.finfo(self.dtype).eps / 2 * max(1.0, float(wanted.abs().max()))
        return float((got - wanted).abs().max()), 2 * float((plain - wanted).abs().max()) + rounding

    def for_peers(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [2, H, S, d] (rotated), k [2, H, T, d] and v [H, T, 2d], contiguous, of a 16-bit cache."""
        q = self.rotated().to(self.dtype).view(self.steps, self.pairs, 2, self.d).permute(2, 1, 0, 3)
        keys, values = (self.inputs[f"past_{side}"][0].view(self.kv_pairs, 2, self.total, self.d) for side in SIDES)
        shared = self.pairs // self.kv_pairs
        k = keys.transpose(0, 1).repeat_interleave(shared, 1)
        v = values.transpose(1, 2).flatten(2).repeat_interleave(shared, 0)
        return q.contiguous(), k.contiguous(), v.contiguous()
