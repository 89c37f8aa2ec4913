"""`diffbit.DiffAttention`: RoPE, cache append, differential attention and head norm in one op.

For every pair (i) of query sub-heads, with d the width of one softmax and T = past_length + S:

    A1 = softmax(scale * q_{2i}   k_s^T)        A2 = softmax(scale * q_{2i+1} k_n^T)
    o  = (A1 - lambda_i * A2) v                 out = o / sqrt(mean(o^2) + norm_eps)   (norm_eps 0: no norm)

Version 1 (arXiv 2410.05258, eq. 1-3; wide_value=1): the cache holds Hk = 2*KV sub-heads; pair i belongs to kv head
g = i // (H/KV), k_s and k_n are the key sub-heads 2g and 2g+1, and v is the value sub-heads 2g and 2g+1 side by
side, 2d wide. Version 2 (hf.co/blog/microsoft/diff-attn-v2; wide_value=0): Hk = KV, both branches of a pair share
the key and the d-wide value of kv head g = i // (H/Hk), lambda is a number per token and head, and there is no norm.
A plain Transformer (branches=1, wide_value=0): one query sub-head per head, o = A1 v, no lambda.
Grouped (arXiv 2510.06949; noise_ratio=R): R neighbouring signal heads share one noise head, so A2 of pair i is that of
noise head i // R. The query has H + H/R sub-heads, in groups of R signal heads and then their noise head; R = 1 is the
order of pairs. R divides H/G, the pairs of a kv head.

Not in the op: (1 - lambda_init), folded into the output projection, and the computation of lambda itself.

Inputs; n = branches
    query           T  [B, S, (H + H/R)*d], with n = 1 [B, S, H*d]    in pairs: 2i signal, 2i+1 noise; not yet rotated
    key, value      T  [B, S, Hk*d]; without them the node appends nothing ("Query-only", below)
    lambda          float [H], or [B, S, H] (after the sigmoid); none where n = 1
    past_key/value  [B, Hk, C, ..]     the cache, below
    past_length     int64 [1]
    position_ids    int64 [B, S]       rows of cos and sin
    cos, sin        float [P, d/2]     rotate-half RoPE: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    attention_mask  int64 [B, T]       0 hides a key (padding); token s sees keys 0..past_length+s that are not hidden,
                                       with a sliding window of n the last n of them
    past_key/value_scale, past_key/value_recent        the cache, below
Outputs
    out             T  [B, S, H*(1+wide_value)*d]; zero where a token sees no key at all
    present_key/value, present_key/value_scale, present_key/value_recent
T is float32 or float16. Inputs and outputs that a node has no use for are empty names, none at the end
(`Signature.inputs`, `Signature.outputs`).

The cache. key_bits says how keys are held and value_bits values, each for itself, by the rules of kv_cache.py:

    bits    key / value             scale                                               recent
    16      T, or float32, float16  -                                                   -
            [B, Hk, C, d]
    8       int8 [B, Hk, C, d]      float32 [B, Hk, C]: a scale a row                   -
    4, 2    uint8                   float16, scales and zero points of blocks: key      float16
            [B, Hk, C, d*bits/8]    [B, Hk, C/32, 2, d]; value [B, Hk, C, 2, d/32]      [B, Hk, window+32, d]

Keys are cached rotated; RoPE rounds both products and their difference to float32. Rows of a sub-head that are rounded
are rounded as float32 (8 bits) or as float16 (4 and 2). What is in a buffer beyond the tokens it holds is never read
as a number.

16 and 8 bits: the buffer holds past_length tokens, C >= past_length, and the present [B, Hk, max(C, T), ..] holds T. It
grows where C < T, else it has the same capacity, and past and present may be one memory. What lies behind is past's.

4 and 2 bits: with quantized(t) = max(0, t - window) // 32 * 32, the buffer holds the first quantized(past_length)
tokens, C >= quantized(past_length), a multiple of 32 like d; `recent`, the residual window, holds the others as
float16, token quantized(past_length) + i in slot i. The present holds quantized(T) tokens in max(C, quantized(T)), its
recent the others; what lies behind in present_recent is anything. So a call has the tokens before quantized(T) as
codes, those from quantized(past_length) on, old and new, as float16, and those in between as both. Which of them token
s reads, its own place says,

    key or value j of token s:  from its code if j < quantized(past_length + s + 1), else as float16

and that is what it reads if the tokens come one by one: neither the cache nor the output depends on how a prompt is cut
into calls, but for the rounding of float32 sums. Padding is tokens like others: it shares blocks with its neighbours.

Sliding window (sliding_window n > 0): a token sees itself and the n - 1 before it, and the cache is a ring, which never
grows: [B, Hk, R, ..] with R = `kv_cache.ring_rows`, n tokens or with 4 and 2 bits the blocks of 32 that hold n. Token t
lies in slot t mod R, a block's scales likewise; the recent tokens are no ring, and all rules above hold. A call sees
what the ring held and its own tokens, and then the ring holds the last R of those that are held at all. A window that
no context exceeds computes what none computes, bit for bit.

Query-only: `past_key`, ... are the presents of another node without a sliding window, which hold the T tokens, the last
S of which are the queries; past_length is T - S. There are no presents. A low-bit cache is read as it lies: the tokens
before quantized(T) from their codes whatever the query's place.

Query bits (query_bits 8 or 4; key_bits 8, 4 or 2): products with codes of keys are products of integers. The query,
rotated, times scale, each operation rounded to float32, is quantized by a row (`kv_cache.row_scores`, 8-bit keys) or
by a row and a block of 32 keys (`kv_cache.block_scores`); the int32 dot product is exact, and then come, in float32,

    row:   dot * query's scale * key's scale
    block: dot * u's scale + query . zero + (2^key_bits - 1) / 2 * sum(u - its codes * u's scale)
           where u = query * the block's scales

products with float16 keys are float32's own. query_bits 0: the float32 query meets float32 keys, code * scale (+ zero).

Attributes: num_heads (H), num_kv_heads (Hk), branches, noise_ratio (R), wide_value, scale, norm_eps, key_bits,
value_bits, query_bits, window (read for 4 and 2 bits only), sliding_window, spec_version.

Integers (codes, packed bytes, dot products) and the scales and zero points of the cache are the same bits on every
implementation, but for the sign of a zero; a number that is infinite or NaN makes its row or block NaN, with codes 0,
in the reference and in kernels, and the body promises nothing for it. All other arithmetic is in float32 whatever T is.
The body never forms a mask per head and, for S = 1, no tensor grows faster than T: the cost of a decode step is linear
in the context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DiffbitError
from . import kv_cache, schema
from .diff_attention_body import GROUPED_BODY, body

if TYPE_CHECKING:
    import onnx_ir
    import torch

OP = schema.DIFF_ATTENTION
INPUTS = tuple(tensor.name for tensor in OP.inputs)
OUTPUTS = tuple(tensor.name for tensor in OP.outputs)


@dataclass(frozen=True)
class Signature:
    """The attributes of a node that decide its inputs, its outputs and its body."""

    key_bits: int = 16
    value_bits: int = 16
    query_bits: int = 0
    branches: int = 2
    noise_ratio: int = 1
    sliding_window: int = 0
    appends: bool = True  # False: query-only

    def __post_init__(self) -> None:
        for attribute in OP.attributes:
            if hasattr(self, attribute.name):
                attribute.check(OP.name, getattr(self, attribute.name))
        if self.query_bits and self.key_bits == 16:
            raise DiffbitError(
                f"{OP.name}: query_bits is {self.query_bits} and key_bits 16, wanted keys of 8, 4 or 2 bits: integers "
                "are multiplied by integers"
            )
        if self.branches == 1 and self.noise_ratio > 1:
            raise DiffbitError(f"{OP.name}: noise_ratio is {self.noise_ratio} and branches 1, wanted 2 branches")
        if self.sliding_window and not self.appends:
            raise DiffbitError(f"{OP.name}: sliding_window is {self.sliding_window}, wanted 0 without key and value")

    def check_width(self, d: int) -> None:
        """A DiffbitError where heads of this width cannot be cached."""
        if min(self.key_bits, self.value_bits) < 8 and d % kv_cache.BLOCK:
            raise DiffbitError(
                f"{OP.name}: heads are {d} wide, wanted a multiple of {kv_cache.BLOCK} for keys or values of 4 or 2 "
                "bits; use 8 bits"
            )

    @property
    def attributes(self) -> dict[str, int]:
        """Those of a node that it knows."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "appends"}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the node's inputs, "" those that it has no use for."""
        return self._used(INPUTS)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self._used(OUTPUTS)

    @property
    def declared_outputs(self) -> tuple[str, ...]:
        """What the function makes: as many as the node has, those left out as well."""
        return OUTPUTS[: len(self.outputs)]

    def _used(self, names: tuple[str, ...]) -> tuple[str, ...]:
        most = {"scale": 8, "recent": 4}  # bits
        used = []
        for name in names:
            bits = self.key_bits if "key" in name else self.value_bits
            unused = bits > most.get(name.rpartition("_")[2], 16) or (name == "lambda" and self.branches == 1)
            new = name in ("key", "value") or name.startswith("present")
            used.append("" if unused or (new and not self.appends) else name)
        while not used[-1]:
            used.pop()
        return tuple(used)


def function(of: Signature = Signature(), grouped: bool = False, name: str | None = None) -> onnx_ir.Function:
    """The op's body as an ONNX model-local function: what runs wherever no native library is registered.

    The nodes of one `name` in a model share it, and their signature. It declares as many inputs and outputs as they
    have; ONNX Runtime inlines it if it makes all of them, those left out as well. grouped: another body, for a float
    cache, one branch and heads of a width that is a multiple of 8: ONNX Runtime's own operators, which write into a
    buffer that is past and present at once.
    """
    return OP.function(GROUPED_BODY if grouped else body(of), INPUTS[: len(of.inputs)], of.declared_outputs, name)


class Cached(NamedTuple):
    """Keys or values of a call as the cache holds them: the first n tokens as codes, the last m as floats. Some tokens
    are both: `coded` says which of them a query reads. Hk is [B, Hk], or whatever the rows begin with."""

    bits: int
    block: int  # tokens that share a scale: 32 of the keys, 1 of the values
    codes: torch.Tensor  # [..., n, d]
    scale: torch.Tensor  # of the codes: [..., n], of 4 and 2 bits with zero points [..., n/32, 2, d], [..., n, 2, d/32]
    floats: torch.Tensor  # [..., m, d]
    coded: torch.Tensor  # bool [S, T]: is read as a code
    # the buffer, its scale, the recent tokens
    presents: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Cached:
        """The same with `change` of codes, scale and floats."""
        return self._replace(codes=change(self.codes), scale=change(self.scale), floats=change(self.floats))

    def grouped(self, groups: int, width: int) -> Cached:
        """[B, Hk, ...] -> [B, G, w, ...]."""
        return self.each(lambda x: x.unflatten(1, (groups, width)))

    def of_branch(self, branch: int) -> Cached:
        """Of [B, G, w, ...] one branch's [B, G, ...]; with w = 1 both branches have the same."""
        return self.each(lambda x: x[:, :, branch % x.shape[2]])

    def as_it_lies(self, steps: int) -> Cached:
        """For so many queries, which see a code wherever there is one; without presents."""
        import torch

        coded = torch.arange(self.coded.shape[1], device=self.codes.device) < self.codes.shape[-2]
        return self._replace(coded=coded.expand(steps, -1), presents=(None, None, None))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that the codes stand for: [..., n, d]."""
        if self.bits >= 8:
            return self.codes.to(dtype) * self.scale[..., None].to(dtype)
        return kv_cache.dequantize_blocks(self.codes, self.scale, -1 if self.block == 1 else -2).to(dtype)


def append(
    rows: torch.Tensor,
    past: torch.Tensor,
    scale: torch.Tensor | None,
    recent: torch.Tensor | None,
    past_length: int,
    bits: int,
    window: int,
    block: int,
    ring: bool = False,
) -> Cached:
    """New rows [B, Hk, S, d] behind the past; block: 32 of keys, 1 of values. ring: are the buffers rings? What they
    have dropped is then zeros."""
    import torch

    total = past_length + rows.shape[2]
    places = range(past_length + 1, total + 1)  # each new token as the last

    def extended(past: torch.Tensor, length: int, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is held, in order, and the present."""
        end, slots = length + new.shape[2], past.shape[2]
        if not ring:
            present = torch.cat((past[:, :, :length], new.to(past.dtype), past[:, :, end:]), 2)
            return present[:, :, :end], present
        found, present = past.new_zeros(*past.shape[:2], end, *past.shape[3:]), past.clone()
        old, kept = (torch.arange(max(0, count - slots), count) for count in (length, end))
        found[:, :, old], found[:, :, length:] = past[:, :, old % slots], new.to(past.dtype)
        present[:, :, kept % slots] = found[:, :, kept]
        return found, present

    def coded(ends: list[int]) -> torch.Tensor:
        return torch.arange(total, device=rows.device) < torch.tensor(ends, device=rows.device).view(-1, 1)

    nothing = rows[:, :, :0]
    if bits == 16:
        floats, present = extended(past, past_length, rows)
        no_scale = nothing[..., 0].float()
        return Cached(bits, block, nothing, no_scale, floats, coded([0 for _ in places]), (present, None, None))
    assert scale is not None
    if bits == 8:
        codes, new_scale = kv_cache.quantize_rows(rows)
        (codes, present), (in_use, scale) = (
            extended(past, past_length, codes),
            extended(scale, past_length, new_scale),
        )
        return Cached(bits, block, codes, in_use, nothing, coded([total for _ in places]), (present, scale, None))
    assert recent is not None
    before, after = (kv_cache.quantized_tokens(tokens, window) for tokens in (past_length, total))
    floats = torch.cat((recent[:, :, : past_length - before], rows.half()), 2)  # from `before` on
    codes, new_scale = kv_cache.quantize_blocks(floats[:, :, : after - before], bits, -1 if block == 1 else -2)
    packed, present = extended(past, before, kv_cache.pack(codes, bits))
    in_use, scale = extended(scale, before // block, new_scale)
    recent = torch.cat((floats[:, :, after - before :], recent[:, :, total - after :]), 2)
    presents, codes = (present, scale, recent), kv_cache.unpack(packed, bits)
    read = coded([kv_cache.quantized_tokens(place, window) for place in places])
    return Cached(bits, block, codes, in_use, floats, read, presents)


def cached(rows: torch.Tensor, length: int, format: str, window: int, block: int) -> Cached:
    """Rows [B, Hk, T, d] as a cache of `format` (kv_cache.BITS) holds them for queries of the last `length` tokens."""
    import torch

    bits, d = kv_cache.BITS[format], rows.shape[3]
    dtype = {"float": rows.dtype, "fp16": torch.float16, "int8": torch.int8}.get(format, torch.uint8)

    def empty(dtype: torch.dtype, *width: int) -> torch.Tensor:
        return rows.new_empty(*rows.shape[:2], 0, *width, dtype=dtype)

    past, recent = empty(dtype, d * min(bits, 8) // 8), empty(torch.float16, d)
    per_block = d if block > 1 else d // kv_cache.BLOCK
    scale = empty(torch.float32) if bits == 8 else empty(torch.float16, 2, per_block)
    found = append(rows, past, scale, recent, 0, bits, window, block)
    return found._replace(coded=found.coded[rows.shape[2] - length :])


def scores(query: torch.Tensor, keys: Cached, query_bits: int) -> torch.Tensor:
    """Queries [B, G, r, S, d], rotated and scaled, times keys [B, G, ...] -> [B, G, r, S, T], before any mask."""
    import torch
    from torch.nn.functional import pad

    dtype, total, shape = query.dtype, keys.coded.shape[1], query.shape[:-1]
    query = query.flatten(2, 3)  # [B, G, r*S, d]
    high = query @ keys.floats.to(dtype).transpose(-1, -2)
    if not keys.codes.shape[-2]:
        return high.view(*shape, total)
    if not query_bits:
        low = query @ keys.dequantized(dtype).transpose(-1, -2)
    elif keys.bits == 8:
        low = kv_cache.row_scores(query, keys.codes, keys.scale, query_bits)
    else:
        low = kv_cache.block_scores(query, keys.codes, keys.scale, query_bits, keys.bits)
    low, high = pad(low, (0, total - low.shape[-1])), pad(high, (total - high.shape[-1], 0))
    return torch.where(keys.coded, low.view(*shape, total), high.view(*shape, total))


def mixed(weights: torch.Tensor, values: Cached) -> torch.Tensor:
    """Weights [B, G, r, S, T], 0 where a token is hidden, times values [B, G, w, ...] -> [B, G, r, S, w, d]."""
    import torch

    total, dtype = weights.shape[-1], weights.dtype
    numbers, floats = values.dequantized(dtype), values.floats.to(dtype)
    low = weights.masked_fill(~values.coded, 0)[..., : numbers.shape[-2]]
    high = weights.masked_fill(values.coded, 0)[..., total - floats.shape[-2] :]
    out = torch.einsum("bgrst,bgwtd->bgrswd", high, floats)
    return out + torch.einsum("bgrst,bgwtd->bgrswd", low, numbers) if numbers.shape[-2] else out


def _difference(
    query: torch.Tensor, keys: Cached, visible: torch.Tensor, lam: torch.Tensor | None, query_bits: int
) -> torch.Tensor:
    """A1 - lambda A2: queries [B, n, G, r, S, d], keys [B, G, w, ...], visible [B, 1, 1, S, T], lam [H] or [B, S, H] ->
    [B, G, r, S, T]."""
    import torch

    shares = []
    for branch in range(query.shape[1]):
        logits = scores(query[:, branch], keys.of_branch(branch), query_bits)
        softmax = torch.softmax(logits.masked_fill(~visible, float("-inf")), -1)
        shares.append(torch.where(visible, softmax, 0.0))  # a row that sees nothing is NaN until here
    if lam is None:
        return shares[0]
    batch, _, groups, shared, steps, _ = query.shape
    lam = lam.to(query.dtype).expand(batch, steps, groups * shared)
    return shares[0] - lam.view(batch, steps, groups, shared).permute(0, 2, 3, 1).unsqueeze(-1) * shares[1]


def in_pairs(query: torch.Tensor, noise_ratio: int) -> torch.Tensor:
    """Query sub-heads [..., H + H/R, d] in groups of R signal heads and their noise head -> [..., 2H, d] in pairs."""
    import torch

    groups = query.unflatten(-2, (-1, noise_ratio + 1))
    signal, noise = groups[..., :-1, :], groups[..., -1:, :]
    return torch.stack((signal, noise.expand_as(signal)), -2).flatten(-4, -2)


def reference(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    lam: torch.Tensor | None,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    past_length: int,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
    past_key_scale: torch.Tensor | None = None,
    past_value_scale: torch.Tensor | None = None,
    past_key_recent: torch.Tensor | None = None,
    past_value_recent: torch.Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    wide_value: bool,
    scale: float,
    norm_eps: float,
    branches: int = 2,
    noise_ratio: int = 1,
    key_bits: int = 16,
    value_bits: int = 16,
    query_bits: int = 0,
    window: int = 0,
    sliding_window: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """The op in torch: inputs as in the module's docstring, past_length as a plain int. All seven outputs, None those
    that the node has no use for.

    Computes in float32, or in float64 when `query` is float64 (then it is its own oracle's precision). What goes into
    a cache of another type than float64, and what a query's codes are made of, is computed in float32 in either case:
    integers and the cache's numbers are the same.
    """
    import torch

    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, steps, _ = query.shape
    d = query.shape[-1] // (num_heads + (branches - 1) * num_heads // noise_ratio)
    of = Signature(key_bits, value_bits, query_bits, branches, noise_ratio, sliding_window, key is not None)
    of.check_width(d)
    width = 2 if wide_value else 1
    groups = num_kv_heads // width
    shared = num_heads // groups  # heads that read one kv head
    total = past_length + steps

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [B, S, heads, d]
        c, s = (table[position_ids].to(x.dtype).unsqueeze(2) for table in (cos, sin))
        low, high = x.chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    none = query.new_empty(batch, num_kv_heads, 0, d)
    key_rows = value_rows = none  # [B, Hk, S, d]
    if key is not None and value is not None:
        rows = key.to(torch.float64 if past_key.dtype == torch.float64 else torch.float32)
        key_rows = rotate(rows.view(batch, steps, num_kv_heads, d)).transpose(1, 2)
        value_rows = value.view(batch, steps, num_kv_heads, d).transpose(1, 2)
    before, ring = total - key_rows.shape[2], sliding_window > 0
    block = kv_cache.BLOCK
    keys = append(key_rows, past_key, past_key_scale, past_key_recent, before, key_bits, window, block, ring)
    values = append(value_rows, past_value, past_value_scale, past_value_recent, before, value_bits, window, 1, ring)
    if not of.appends:
        keys, values = keys.as_it_lies(steps), values.as_it_lies(steps)

    q = query.to(torch.float32 if query_bits else dtype).view(batch, steps, query.shape[-1] // d, d)
    q = (rotate(q) * scale).to(dtype)
    q = (in_pairs(q, noise_ratio) if branches == 2 else q).view(batch, steps, groups, shared, branches, d)
    q = q.permute(0, 4, 2, 3, 1, 5)  # [B, n, G, r, S, d]
    places = torch.arange(past_length, total)[:, None]
    causal = (torch.arange(total) <= places) & (torch.arange(total) > places - (sliding_window or total))
    visible = (causal & attention_mask.bool()[:, None, :])[:, None, None]  # [B, 1, 1, S, T]
    weights = _difference(q, keys.grouped(groups, width), visible, lam, query_bits)

    out = mixed(weights, values.grouped(groups, width))  # [B, G, r, S, w, d]
    out = out.permute(0, 3, 1, 2, 4, 5).reshape(batch, steps, num_heads, width * d)
    if norm_eps > 0:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps)
    out = out.reshape(batch, steps, num_heads * width * d).to(query.dtype)
    (key_buffer, *key_rest), (value_buffer, *value_rest) = keys.presents, values.presents
    rest = (part for pair in zip(key_rest, value_rest, strict=True) for part in pair)
    return out, key_buffer, value_buffer, *rest
