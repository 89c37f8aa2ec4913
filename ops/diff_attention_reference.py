"""DiffAttention in torch: the reference for its body and every kernel, and low-bit attention of models in torch
(quantize/attention.py). ops/diff_attention.py specifies the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from . import kv_cache
from .diff_attention import Signature

if TYPE_CHECKING:
    import torch


class Cached(NamedTuple):
    """Keys or values of a call as the cache holds them: the first n tokens as codes, and all T tokens as floats, of
    which only those that some query reads are right. Leading dimensions are [B, Hk], or any others. Below 16 bits, all
    rows are rotated (`kv_cache.rotate`)."""

    bits: int
    levels: torch.Tensor  # [..., n, d]; those of int8 are its codes
    scale: torch.Tensor  # [..., n]
    offset: torch.Tensor  # [..., 1, d], of the codes; zeros where the cache has none
    floats: torch.Tensor  # [..., T, d]; int8: [..., 0, d]
    coded: torch.Tensor  # bool [S, T], [1, T] without new tokens: read as a code
    # the buffer, its scale, the recent tokens
    presents: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    @property
    def is_rotated(self) -> bool:
        return self.bits < 16

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Cached:
        """Apply `change` to levels, scale, offset and floats."""
        return self._replace(
            levels=change(self.levels), scale=change(self.scale), offset=change(self.offset), floats=change(self.floats)
        )

    def grouped(self, groups: int, width: int) -> Cached:
        """Reshape [B, Hk, ...] to [B, G, w, ...]."""
        return self.apply(lambda x: x.unflatten(1, (groups, width)))

    def of_branch(self, branch: int) -> Cached:
        """Of [B, G, w, ...] one branch's [B, G, ...]; with w = 1 both branches have the same."""
        return self.apply(lambda x: x[:, :, branch % x.shape[2]])

    def as_stored(self, steps: int) -> Cached:
        """For `steps` queries that read every code that the last one reads; without presents."""
        return self._replace(coded=self.coded[-1:].expand(steps, -1), presents=(None, None, None))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the codes: [..., n, d]."""
        return self.levels.to(dtype) * self.scale[..., None].to(dtype) + self.offset.to(dtype)


def append(
    rows: torch.Tensor,
    past: torch.Tensor,
    scale: torch.Tensor | None,
    recent: torch.Tensor | None,
    past_length: int,
    bits: int,
    window: int,
    first: int = 0,
    has_offset: bool = False,
    ring: bool = False,
) -> Cached:
    """Append new rows [B, Hk, S, d] to the past. has_offset: they are keys. ring: whether the buffers are rings; tokens
    that they have overwritten become zeros."""
    import torch

    total = past_length + rows.shape[2]
    places = range(past_length + 1, total + 1) or [total]  # the length when each new token is the last; one at least

    def extended(past: torch.Tensor, length: int, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all stored entries in order, and the present."""
        end, slots = length + new.shape[2], past.shape[2]
        if not ring:
            present = torch.cat((past[:, :, :length], new.to(past.dtype), past[:, :, end:]), 2)
            return present[:, :, :end], present
        entries, present = past.new_zeros(*past.shape[:2], end, *past.shape[3:]), past.clone()
        old, kept = (torch.arange(max(0, count - slots), count) for count in (length, end))
        entries[:, :, old], entries[:, :, length:] = past[:, :, old % slots], new.to(past.dtype)
        present[:, :, kept % slots] = entries[:, :, kept]
        return entries, present

    def coded(ends: list[int]) -> torch.Tensor:
        """Whether a token is at least `first` and below the end that each new token sees."""
        tokens = torch.arange(total, device=rows.device)
        return (tokens >= first) & (tokens < torch.tensor(ends, device=rows.device).view(-1, 1))

    nothing, no_offset = rows[:, :, :0], rows.new_zeros(*rows.shape[:2], 1, rows.shape[3])
    if bits == 16:
        floats, present = extended(past, past_length, rows)
        no_scale = nothing[..., 0].float()
        return Cached(bits, nothing, no_scale, no_offset, floats, coded([0 for _ in places]), (present, None, None))
    assert scale is not None
    if bits == 8:
        codes, new_scale = kv_cache.encode_rows(kv_cache.rotate(rows.float()), bits)
        codes, present = extended(past, past_length, codes)
        in_use, scale = extended(scale, past_length, new_scale)
        read = torch.ones(len(places), total, dtype=torch.bool, device=rows.device)
        return Cached(bits, codes, in_use, no_offset, nothing, read, (present, scale, None))
    assert recent is not None
    before, after = (kv_cache.quantized_tokens(tokens, window) for tokens in (past_length, total))
    firsts, offset, residual = recent.split([first, has_offset, recent.shape[2] - first - has_offset], 2)
    new = kv_cache.rotate(rows.float()).half()
    floats = torch.cat((residual[:, :, : past_length - before], new), 2)  # from `before` on
    known = min(past_length, first)
    firsts = torch.cat((firsts[:, :, :known], new[:, :, : first - known], firsts[:, :, total:]), 2)
    if has_offset and before == 0 and after > 0:
        offset = kv_cache.offset_of(floats).unsqueeze(2)
    leaving = floats[:, :, : after - before].float()
    codes, new_scale = kv_cache.encode_rows(leaving - offset.float() if has_offset else leaving, bits)
    packed, present = extended(past, before, kv_cache.pack(codes, bits))
    in_use, scale = extended(scale, before, new_scale)
    recent = torch.cat((firsts, offset, floats[:, :, after - before :], residual[:, :, total - after :]), 2)
    levels = kv_cache.levels_of(kv_cache.unpack(packed, bits), bits)
    unread = new.new_zeros(*new.shape[:2], before, new.shape[3])
    unread[:, :, :first] = firsts[:, :, :before]
    floats = torch.cat((unread, floats), 2)
    read = coded([kv_cache.quantized_tokens(place, window) for place in places])
    offset = offset.float() if has_offset else no_offset
    return Cached(bits, levels, in_use, offset, floats, read, (present, scale, recent))


def cached(rows: torch.Tensor, length: int, format: str, window: int, first: int, has_offset: bool) -> Cached:
    """Put rows [B, Hk, T, d] into a cache of `format` (kv_cache.BITS), for queries of the last `length` tokens."""
    import torch

    bits, d = kv_cache.BITS[format], rows.shape[3]
    dtype = {"float": rows.dtype, "fp16": torch.float16, "int8": torch.int8}.get(format, torch.uint8)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return rows.new_zeros(*rows.shape[:2], *shape, dtype=dtype)

    past, recent = empty(dtype, 0, d * min(bits, 8) // 8), empty(torch.float16, first + has_offset, d)
    scale = empty(torch.float16, 0)
    stored = append(rows, past, scale, recent, 0, bits, window, first, has_offset)
    return stored._replace(coded=stored.coded[rows.shape[2] - length :])


def scores(query: torch.Tensor, keys: Cached, query_bits: int) -> torch.Tensor:
    """Multiply queries [B, G, r, S, d], after RoPE and scaled, by keys [B, G, ...] -> [B, G, r, S, T], without a
    mask."""
    import torch
    from torch.nn.functional import pad

    dtype, total, shape = query.dtype, keys.coded.shape[1], query.shape[:-1]
    query = query.flatten(2, 3)  # [B, G, r*S, d]
    if keys.is_rotated:
        query = kv_cache.rotate(query.float()).to(dtype) if query_bits else kv_cache.rotate(query)
    if not keys.levels.shape[-2]:
        return (query @ keys.floats.to(dtype).transpose(-1, -2)).view(*shape, total)
    if query_bits:
        low = kv_cache.row_scores(query, keys.levels, keys.scale, query_bits)
        low = low + query @ keys.offset.to(dtype).transpose(-1, -2)
    else:
        low = query @ keys.dequantized(dtype).transpose(-1, -2)
    low = pad(low, (0, total - low.shape[-1])).view(*shape, total)
    if not keys.floats.shape[-2]:
        return low
    high = (query @ keys.floats.to(dtype).transpose(-1, -2)).view(*shape, total)
    return torch.where(keys.coded, low, high)


def mixed(weights: torch.Tensor, values: Cached) -> torch.Tensor:
    """Multiply weights [B, G, r, S, T], 0 for hidden tokens, by values [B, G, w, ...] -> [B, G, r, S, w, d]."""
    import torch

    dtype = weights.dtype
    out = torch.zeros((), dtype=dtype, device=weights.device)
    if count := values.levels.shape[-2]:
        low = weights.masked_fill(~values.coded, 0)[..., :count]
        out = out + torch.einsum("bgrst,bgwtd->bgrswd", low, values.dequantized(dtype))
    if values.floats.shape[-2]:
        high = weights.masked_fill(values.coded, 0)
        out = out + torch.einsum("bgrst,bgwtd->bgrswd", high, values.floats.to(dtype))
    return kv_cache.rotate(out) if values.is_rotated else out


def _difference(
    query: torch.Tensor, keys: Cached, visible: torch.Tensor, lam: torch.Tensor | None, query_bits: int
) -> torch.Tensor:
    """Return A1 - lambda A2 [B, G, r, S, T] of queries [B, n, G, r, S, d], keys [B, G, w, ...], visible [B, 1, 1, S, T]
    and lam [H] or [B, S, H]."""
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
    """Expand query sub-heads [..., H + H/R, d], groups of R signal heads and a noise head, to pairs [..., 2H, d]."""
    import torch

    groups = query.unflatten(-2, (-1, noise_ratio + 1))
    signal, noise = groups[..., :-1, :], groups[..., -1:, :]
    return torch.stack((signal, noise.expand_as(signal)), -2).flatten(-4, -2)


def rotated(x: torch.Tensor, position_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to [B, S, heads, d]."""
    import torch

    c, s = (table[position_ids].to(x.dtype).unsqueeze(2) for table in (cos, sin))
    low, high = x.chunk(2, -1)
    return torch.cat((low * c - high * s, high * c + low * s), -1)


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
    gates: torch.Tensor | None = None,
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
    first: int = 0,
    sliding_window: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """Compute the op in torch: inputs as in diff_attention.py, past_length as an int. Returns all seven outputs; None
    for those that the node does not need.

    Computes in float32, or in float64 if `query` is float64. Numbers for a cache of another type than float64, and a
    query's codes, are always computed in float32, so that integers and the cache's numbers are the same.
    """
    import torch

    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, steps, _ = query.shape
    d = query.shape[-1] // (num_heads + (branches - 1) * num_heads // noise_ratio)
    of = Signature(key_bits, value_bits, query_bits, branches, noise_ratio, sliding_window, key is not None)
    of.check_width(d)
    width = 2 if wide_value else 1
    groups = num_kv_heads // width
    shared = num_heads // groups  # heads per kv head
    total = past_length + steps

    none = query.new_empty(batch, num_kv_heads, 0, d)
    key_rows = value_rows = none  # [B, Hk, S, d]
    if key is not None and value is not None:
        rows = key.to(torch.float64 if past_key.dtype == torch.float64 else torch.float32)
        key_rows = rotated(rows.view(batch, steps, num_kv_heads, d), position_ids, cos, sin).transpose(1, 2)
        value_rows = value.view(batch, steps, num_kv_heads, d).transpose(1, 2)
    before, ring = total - key_rows.shape[2], sliding_window > 0
    layout = window, first
    keys = append(key_rows, past_key, past_key_scale, past_key_recent, before, key_bits, *layout, True, ring)
    values = append(
        value_rows, past_value, past_value_scale, past_value_recent, before, value_bits, *layout, False, ring
    )
    if not of.appends:
        keys, values = keys.as_stored(steps), values.as_stored(steps)

    q = query.to(torch.float32 if query_bits else dtype).view(batch, steps, query.shape[-1] // d, d)
    q = (rotated(q, position_ids, cos, sin) * scale).to(dtype)
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
    if gates is not None:
        out = torch.where(gates[..., None] == 0, 0.0, out * gates[..., None].to(dtype))
    out = out.reshape(batch, steps, num_heads * width * d).to(query.dtype)
    (key_buffer, *key_rest), (value_buffer, *value_rest) = keys.presents, values.presents
    rest = (part for pair in zip(key_rest, value_rest, strict=True) for part in pair)
    return out, key_buffer, value_buffer, *rest
