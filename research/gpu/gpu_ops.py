"""diffbit's ops on a device: calls of their CUDA kernels, what must come out, and what they cost at least.

A layer of differential attention. A token of the past and a pair of heads are 4d numbers: two keys and two values (a
wide one) of d. Decoding reads them once for both softmaxes, so the fewest bytes are

    16 bits    8 d                      8 bits   4 d + 4 scales of 4 bytes
    4 bits     2 d + 4 scales of 2 bytes

for each token and pair. A prompt of S tokens sees S (S + 1) / 2 pairs of places; each costs 2 products with keys of d
and 2 with values of 2d, a multiplication and an addition a number: 4 d + 8 d = 12 d operations a pair of heads.

A weight [N, K] times activations [M, K]: the fewest bytes are the weight's, the activations' and the output's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from caches import FIRST, WINDOW, low_bit_cache
from clock import Call
from torch import Tensor

from diffbit.ops import int4_matmul, kv_cache, ternary_matmul
from tests.native import cuda

TYPES = {torch.float32: cuda.FLOAT32, torch.float16: cuda.FLOAT16, torch.bfloat16: cuda.BFLOAT16}
BITS = {"bf16": 16, "int8": 8, "int4": 4}  # of the kinds of cache
QUERIES = 64  # of a prompt that are checked
EPS = 1e-5
GROUP, TILE = 32, int4_matmul.TILE
ROWS, TILES = 4, 4  # of activations, and of a weight at either end, that are checked


def call(kernels: cuda.Kernels, op: cuda.Op, *kept: Tensor) -> Call:
    """Starts `op` on torch's stream; `kept` are tensors that it points to. The workspace is made once, full of NaN."""
    device = kept[0].device
    space = torch.full((kernels.workspace(op),), 0xFF, dtype=torch.uint8, device=device)

    def run(alive: tuple[Tensor, ...] = (space, *kept)) -> None:
        kernels.run(op, space.data_ptr(), torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0)

    return run


# ---- attention ------------------------------------------------------------------------------------------------------


def flops(pairs: int, d: int, steps: int) -> float:
    """Of a causal prompt; see the module's docstring."""
    return 12.0 * d * pairs * steps * (steps + 1) / 2


@dataclass
class Layer:
    """`steps` new tokens in bfloat16 behind `past`; `kind` is the cache's. Queries, keys and values have unit variance.

    The buffers hold all tokens, so past and present are one memory. Where tokens enter the codes of a cache of 4 bits
    the call does so each time it is made: `past` is chosen by the caller so that none does.
    """

    kind: str
    pairs: int
    d: int
    past: int
    steps: int
    device: str
    seed: int = 0
    inputs: dict[str, Tensor] = field(init=False)
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)
        total, width = self.total, 2 * self.pairs * self.d
        angles = torch.arange(total, device=self.device)[:, None] * 10000.0 ** (
            -torch.arange(self.d // 2, device=self.device) / (self.d // 2)
        )
        self.inputs = {
            **{name: self._normal(1, self.steps, width) for name in ("query", "key", "value")},
            "lambda": torch.rand(self.pairs, generator=self._generator, device=self.device),
            "position_ids": torch.arange(self.past, total, device=self.device)[None],
            "cos": angles.cos(), "sin": angles.sin(),
            "attention_mask": torch.ones(1, total, dtype=torch.int64, device=self.device),
            **self._cache("key"), **self._cache("value"),
        }  # fmt: skip
        self.out = torch.full((1, self.steps, width), math.nan, dtype=torch.bfloat16, device=self.device)

    def _normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype)

    def _cache(self, side: str) -> dict[str, Tensor]:
        """Buffers with all tokens; low-bit ones are made of random numbers, a head at a time."""
        bits, heads, name = BITS[self.kind], 2 * self.pairs, f"past_{side}"
        if bits == 16:
            return {name: self._normal(1, heads, self.total, self.d)}
        rows = [self._normal(1, 1, self.total, self.d, dtype=torch.float16) for _ in range(heads)]
        if bits == 8:
            quantized = [kv_cache.encode_rows(kv_cache.rotate(row.float()), bits) for row in rows]
            return {name: torch.cat([codes for codes, _ in quantized], 1),
                    f"{name}_scale": torch.cat([steps for _, steps in quantized], 1)}  # fmt: skip
        parts = zip(*(low_bit_cache(row, bits, side) for row in rows), strict=True)
        names = (name, f"{name}_scale", f"{name}_recent")
        return {name: torch.cat(part, 1) for name, part in zip(names, parts, strict=True)}

    @property
    def total(self) -> int:
        return self.past + self.steps

    @property
    def cache_bytes(self) -> int:
        """That one decoded token must read: of the cache, what holds tokens."""
        d, bits = self.d, BITS[self.kind]
        if bits > 4:
            return {16: 8 * d, 8: 4 * d + 16}[bits] * self.total * self.pairs
        count = self.quantized(self.total)
        return ((2 * d + 8) * count + 8 * d * (self.total - count)) * self.pairs

    def call(self, kernels: cuda.Kernels) -> Call:
        """One call of the layer; the cache's present is its past."""
        bits = BITS[self.kind]
        pointers = {name: tensor.data_ptr() for name, tensor in self.inputs.items()}
        pointers |= {name.replace("past", "present"): at for name, at in pointers.items() if name.startswith("past")}
        keys, values = (self.inputs[f"past_{side}"].shape[2] for side in ("key", "value"))
        op = cuda.DiffAttention(
            **pointers, out=self.out.data_ptr(), batch=1, steps=self.steps, past_length=self.past, heads=self.pairs,
            mask_row=self.past + self.steps,
            kv_heads=2 * self.pairs, d=self.d, past_key_capacity=keys, past_value_capacity=values, key_capacity=keys,
            value_capacity=values, positions=self.total, branches=2, noise_ratio=1, wide_value=1, lambda_per_token=0,
            key_bits=bits, value_bits=bits, query_bits=0, window=WINDOW, first=FIRST, type=cuda.BFLOAT16,
            key_type=cuda.BFLOAT16, value_type=cuda.BFLOAT16, scale=1 / math.sqrt(self.d), norm_eps=EPS,
        )  # fmt: skip
        return call(kernels, op, self.out, *self.inputs.values())

    def numbers(self, side: str, head: int) -> tuple[Tensor, Tensor]:
        """The numbers float32 [T, d] of one sub-head after the call, as codes and as floats, or zeros."""
        bits, buffer = BITS[self.kind], self.inputs[f"past_{side}"][:, head]
        codes, floats = torch.zeros(2, self.total, self.d, device=self.device)
        if bits == 16:
            return codes, buffer[0].float()
        scale = self.inputs[f"past_{side}_scale"][:, head]
        if bits == 8:
            return kv_cache.rotate(buffer[0].float() * scale[0, :, None]), floats
        count, recent = self.quantized(self.total), self.inputs[f"past_{side}_recent"][0, head].float()
        levels = kv_cache.levels_of(kv_cache.unpack(buffer[0, :count], bits), bits)
        codes[:count] = levels * scale[0, :count, None]
        begin = FIRST
        if side == "key":
            codes[:count] += recent[FIRST]
            begin += 1
        new = self.inputs[side][0].float().view(self.steps, -1, self.d)[:, head]
        new = self._rotate(new, torch.float32) if side == "key" else new
        floats[self.past :] = kv_cache.rotate(new).half()
        floats[count:] = recent[begin : begin + self.total - count]
        floats[:FIRST] = recent[:FIRST]
        return kv_cache.rotate(codes), kv_cache.rotate(floats)

    def quantized(self, tokens: int) -> int:
        """How many of so many tokens a query sees as codes."""
        return {16: 0, 8: self.total}.get(BITS[self.kind], kv_cache.quantized_tokens(tokens, WINDOW))

    def _rotate(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [S, ..., d] of the new tokens."""
        shape = (self.steps, *(1 for _ in x.shape[2:]), self.d // 2)
        cos, sin = (self.inputs[name][self.past :].to(dtype).view(shape) for name in ("cos", "sin"))
        low, high = x.to(dtype).chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def rotated(self) -> Tensor:
        """The queries, float64 [S, 2 pairs, d], rotated."""
        return self._rotate(self.inputs["query"][0].view(self.steps, 2 * self.pairs, self.d), torch.float64)

    def attended(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """What comes out for the tokens `rows` [n]: [n, pairs, 2d] float64; multiplied in `dtype`.

        In float64 it is the oracle; in the layer's own type the reference of the same precision: operands, shares of
        the softmax and products rounded to it, sums and the norm in float32 or wider, as torch does.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        queries = self.rotated()[rows] / math.sqrt(self.d)
        tokens = torch.arange(self.total, device=self.device)
        hidden = tokens > self.past + rows[:, None]
        counts = torch.tensor([self.quantized(self.past + row + 1) for row in rows.tolist()], device=self.device)
        coded = (tokens >= FIRST * (BITS[self.kind] < 8)) & (tokens < counts[:, None])  # [n, T]
        out = []
        for pair in range(self.pairs):
            wide_values = zip(*(self.numbers("value", 2 * pair + i) for i in range(2)), strict=True)
            values = [torch.cat(halves, -1).to(dtype) for halves in wide_values]
            parts = []
            for head in (2 * pair, 2 * pair + 1):
                dots = [(queries[:, head].to(dtype) @ keys.to(dtype).T).to(wide) for keys in self.numbers("key", head)]
                shares = torch.softmax(torch.where(coded, *dots).masked_fill(hidden, -torch.inf), -1).to(dtype)
                mixed = (shares * coded) @ values[0] + (shares * ~coded) @ values[1]
                parts.append(mixed.to(wide))
            difference = parts[0] - self.inputs["lambda"][pair].to(wide) * parts[1]
            out.append(difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + EPS))
        return torch.stack(out, 1).to(torch.bfloat16 if dtype != torch.float64 else dtype).double()

    def error(self) -> tuple[float, float]:
        """The largest error of `out`, and what is allowed: twice that of torch in the same precision, and a rounding.

        NaN is infinitely wrong.
        """
        rows = torch.arange(self.steps, device=self.device)
        if self.steps > QUERIES:
            some = torch.randperm(self.steps, device=self.device)[: QUERIES - 2]
            rows = torch.cat((some, rows[:1], rows[-1:]))
        expected = self.attended(rows, torch.float64)
        got = self.out[0, rows].double().view(expected.shape)
        if self.out.isnan().any():
            return math.inf, 0.0
        in_floats = BITS[self.kind] < 16 and self.steps == 1  # a prompt's numbers are rounded to bfloat16
        plain = self.attended(rows, torch.float32 if in_floats else torch.bfloat16)
        rounding = torch.finfo(torch.bfloat16).eps / 2 * max(1.0, float(expected.abs().max()))
        return float((got - expected).abs().max()), 2 * float((plain - expected).abs().max()) + rounding

    def for_peers(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [2, H, S, d] (rotated), k [2, H, T, d] and v [H, T, 2d], contiguous, of a cache of 16 bits."""
        q = self.rotated().to(torch.bfloat16).view(self.steps, self.pairs, 2, self.d).permute(2, 1, 0, 3)
        keys, values = (
            self.inputs[f"past_{side}"].view(self.pairs, 2, self.total, self.d) for side in ("key", "value")
        )
        return q.contiguous(), keys.transpose(0, 1).contiguous(), values.transpose(1, 2).flatten(2).contiguous()


# ---- products -------------------------------------------------------------------------------------------------------


class Weights:
    """`count` random weights [N, K] of one format, "ternary" or "int4_g32", and products with activations [M, K]."""

    def __init__(self, op: str, n: int, k: int, count: int, device: str) -> None:
        self.op, self.n, self.k, self.device = op, n, k, device
        self.weights = [self._ternary() if op == "ternary" else self._int4() for _ in range(count)]

    def _ternary(self) -> tuple[Tensor, ...]:
        codes = torch.randint(-1, 2, (self.n, self.k), dtype=torch.int8, device=self.device)
        return ternary_matmul.pack(codes), torch.tensor([0.037], device=self.device)

    def _int4(self) -> tuple[Tensor, ...]:
        codes = torch.randint(16, (self.n, self.k), dtype=torch.uint8, device=self.device)
        scales = torch.rand(self.n, self.k // GROUP, device=self.device).add(0.5).mul(0.02).half()
        packed = int4_matmul.pack(codes, scales, None, GROUP)
        return packed.codes, packed.scales, packed.zeros, torch.ones(1, device=self.device)

    @property
    def nbytes(self) -> int:
        """Of one weight."""
        return sum(tensor.nbytes for tensor in self.weights[0])

    def calls(self, kernels: cuda.Kernels, x: Tensor, y: Tensor | None = None) -> list[Call]:
        """x [M, K] times each of the weights."""
        y = torch.empty(x.shape[0], self.n, dtype=x.dtype, device=x.device) if y is None else y
        started = []
        for weight in self.weights:
            shape = {"m": x.shape[0], "n": self.n, "k": self.k, "type": TYPES[x.dtype]}
            pointers = [tensor.data_ptr() for tensor in weight]
            op: cuda.Op
            if self.op == "ternary":
                packed, scale = pointers
                op = cuda.TernaryMatMul(a=x.data_ptr(), packed=packed, scale=scale, y=y.data_ptr(), activation_bits=8,
                                        **shape)  # fmt: skip
            else:
                codes, scales, _, factor = pointers  # one zero point, 8, for all is no pointer at all
                op = cuda.Int4MatMul(a=x.data_ptr(), codes=codes, scales=scales, zeros=None, factor=factor,
                                     y=y.data_ptr(), group_size=GROUP, **shape)  # fmt: skip
            started.append(call(kernels, op, x, y, *weight))
        return started

    def error(self, kernels: cuda.Kernels, x: Tensor) -> tuple[float, float]:
        """The largest error of the first and of the last weight's product, and what is allowed: one rounding of the
        largest number in the activations' type. Held against the op's reference are some rows of the activations and
        the first and last tiles of the weight; NaN, wherever it is, is infinitely wrong."""
        tiles = torch.arange(-(-self.n // TILE))
        tiles = torch.cat((tiles[:TILES], tiles[-TILES:]))
        some = torch.randperm(x.shape[0])[:ROWS]
        worst, largest = 0.0, 0.0
        for which in (0, -1):
            y = torch.full((x.shape[0], self.n), math.nan, dtype=x.dtype, device=x.device)
            self.calls(kernels, x, y)[which]()
            if y.isnan().any():
                return math.inf, 0.0
            got = y.cpu()[some].unflatten(1, (-1, TILE))[:, tiles].flatten(1)
            expected = self._reference(x.cpu()[some], self.weights[which], tiles)
            worst = max(worst, float((got.double() - expected.double()).abs().max()))
            largest = max(largest, float(expected.abs().max()))
        return worst, torch.finfo(x.dtype).eps * largest

    def _reference(self, x: Tensor, weight: tuple[Tensor, ...], tiles: Tensor) -> Tensor:
        """x [M, K] times the rows of the weight in some tiles of 16: [M, 16 tiles]."""
        if self.op == "ternary":
            packed, scale = (tensor.cpu() for tensor in weight)
            return ternary_matmul.reference(x, packed.unflatten(0, (-1, TILE))[tiles].flatten(0, 1), scale)
        codes, scales, zeros, factor = (tensor.cpu() for tensor in weight)
        packed = int4_matmul.TiledWeight(codes[tiles], scales[tiles], zeros)
        return int4_matmul.reference(x, packed, factor, len(tiles) * TILE, GROUP)
