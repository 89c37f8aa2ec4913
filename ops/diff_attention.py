"""`diffbit.DiffAttention`: RoPE, cache append, differential attention and head norm in one op.

For every pair (i) of query sub-heads, with d the width of one softmax and T = past_length + S:

    A1 = softmax(scale * q_{2i}   k_s^T)        A2 = softmax(scale * q_{2i+1} k_n^T)
    o  = (A1 - lambda_i * A2) v                 out = o / sqrt(mean(o^2) + norm_eps)   (norm_eps 0: no norm)

Version 1 (arXiv 2410.05258, eq. 1-3; wide_value=1): the cache holds Hk = 2*KV sub-heads; pair i belongs to kv head
g = i // (H/KV), k_s and k_n are the key sub-heads 2g and 2g+1, and v is the value sub-heads 2g and 2g+1 side by
side, 2d wide. Version 2 (hf.co/blog/microsoft/diff-attn-v2; wide_value=0): Hk = KV, both branches of a pair share
the key and the d-wide value of kv head g = i // (H/Hk), lambda is a number per token and head, and there is no norm.
A plain Transformer (branches=1, wide_value=0): one query sub-head per head, o = A1 v, no lambda.

Not in the op: (1 - lambda_init), folded into the output projection, and the computation of lambda itself.

Inputs; n = branches
    query           T  [B, S, n*H*d]   sub-heads in adjacent pairs: 2i signal, 2i+1 noise; not yet rotated
    key, value      T  [B, S, Hk*d]
    lambda          float [H], or [B, S, H] (after the sigmoid); none where n = 1
    past_key/value  [B, Hk, C, ..]     the cache, below
    past_length     int64 [1]
    position_ids    int64 [B, S]       rows of cos and sin
    cos, sin        float [P, d/2]     rotate-half RoPE: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    attention_mask  int64 [B, T]       0 hides a key (padding); token s sees keys 0..past_length+s that are not hidden
    past_key/value_scale, past_key/value_recent        the cache, below
Outputs
    out             T  [B, S, H*(1+wide_value)*d]; zero where a token sees no key at all
    present_key/value, present_key/value_scale, present_key/value_recent
T is float32 or float16. Inputs and outputs that a node has no use for are empty names, none at the end (`Kind.inputs`,
`Kind.outputs`).

The cache. key_bits says how keys are held and value_bits values, each for itself, by the rules of kv_cache.py:

    bits    key / value             scale                                               recent
    16      T, or float32, float16  -                                                   -
            [B, Hk, C, d]
    8       int8 [B, Hk, C, d]      float32 [B, Hk, C]: a step a row                    -
    4, 2    uint8                   float16, key [B, Hk, C/32, 2, d]: grids (step,      float16
            [B, Hk, C, d*bits/8]    point) of 32 tokens; value [B, Hk, C, 2, d/32]      [B, Hk, window+32, d]

Keys are cached rotated; RoPE rounds both products and their difference to float32. Rows of a sub-head that are rounded
are rounded as float32 (8 bits) or as float16 (4 and 2). What is in a buffer beyond the tokens it holds is never read
as a number.

16 and 8 bits: the buffer holds past_length tokens, C >= past_length, and the present [B, Hk, max(C, T), ..] holds T. It
grows where C < T, else it has the same capacity, and past and present may be one memory. What lies behind is past's.

4 and 2 bits: with settled(t) = max(0, t - window) // 32 * 32, the buffer holds the first settled(past_length) tokens,
C >= settled(past_length), a multiple of 32 like d; `recent` holds the others as float16, token settled(past_length) + i
in slot i. The present holds settled(T) tokens in max(C, settled(T)), its recent the others; what lies behind in
present_recent is anything. So a call has the tokens before settled(T) as codes, those from settled(past_length) on,
old and new, as float16, and those in between as both. Which of them token s reads, its own place says,

    key or value j of token s:  from its code if j < settled(past_length + s + 1), else as float16

and that is what it reads if the tokens come one by one: neither the cache nor the output depends on how a prompt is cut
into calls, but for the rounding of float32 sums. Padding is tokens like others: it shares grids with its neighbours.

Query bits (query_bits 8 or 4; key_bits 8, 4 or 2): products with codes of keys are products of integers. The query,
rotated, times scale, each step rounded to float32, is rounded to codes by a row (`kv_cache.row_scores`, 8-bit keys) or
by a row and a group of 32 keys (`kv_cache.grid_scores`); the int32 dot product is exact, and then come, in float32,

    row:   dot * query's step * key's step
    group: dot * query's step + query . point + (2^key_bits - 1) / 2 * sum(query * steps - its codes * query's step)

products with float16 keys are float32's own. query_bits 0: the float32 query meets float32 keys, code * step (+ point).

Logits (logit_bits, 0: as they are). A node whose logits are rounded is a `LowBitLogitsAttention`: the same op with the
attribute logit_bits in addition, and with a body only, so that it runs everywhere and no library knows it. A row of
logits of one query sub-head, from above, is rounded before the softmax (quantize/attention.py): step = max|x| over the
keys that it sees / (2^(bits-1) - 1), x = round-half-to-even(x / step) * step, clipped to the row's range.

Attributes: num_heads (H), num_kv_heads (Hk), branches, wide_value, scale, norm_eps, key_bits, value_bits, query_bits,
window (read for 4 and 2 bits only), spec_version.

Integers (codes, packed bytes, dot products) and the steps and points of the cache are the same bits on every
implementation, but for the sign of a zero; a number that is infinite or NaN makes its row or grid NaN, with codes 0, in
the reference and in kernels, and the body promises nothing for it. All other arithmetic is in float32 whatever T is.
The body never forms a mask per head and, for S = 1, no tensor grows faster than T: the cost of a decode step is linear
in the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DiffbitError
from . import kv_cache
from .diff_attention_body import body

if TYPE_CHECKING:
    import onnx_ir
    import torch

DOMAIN = "diffbit"
NAME = "DiffAttention"
LOGITS_NAME = "LowBitLogitsAttention"
VERSION = 2  # of the meaning; a kernel checks it against the attribute spec_version

INPUTS = (
    "query", "key", "value", "lambda", "past_key", "past_value", "past_length", "position_ids", "cos", "sin",
    "attention_mask", "past_key_scale", "past_value_scale", "past_key_recent", "past_value_recent",
)  # fmt: skip
OUTPUTS = (
    "out", "present_key", "present_value", "present_key_scale", "present_value_scale", "present_key_recent",
    "present_value_recent",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What of a node's attributes decides its inputs, its outputs and its body."""

    key_bits: int = 16
    value_bits: int = 16
    query_bits: int = 0
    branches: int = 2
    logit_bits: int = 0

    def __post_init__(self) -> None:
        for name, found, wanted in (
            ("key_bits", self.key_bits, (16, 8, 4, 2)),
            ("value_bits", self.value_bits, (16, 8, 4, 2)),
            ("query_bits", self.query_bits, (0, 8, 4)),
            ("branches", self.branches, (1, 2)),
            ("logit_bits", self.logit_bits, (0, *range(2, 17))),
        ):
            if type(found) is not int or found not in wanted:
                raise DiffbitError(f"{NAME}: {name} is {found!r}, wanted one of {', '.join(map(str, wanted))}")
        if self.query_bits and self.key_bits == 16:
            raise DiffbitError(
                f"{NAME}: query_bits is {self.query_bits} and key_bits 16, wanted keys of 8, 4 or 2 bits: integers are "
                "multiplied by integers"
            )

    def check_width(self, d: int) -> None:
        """A DiffbitError where heads of this width cannot be held."""
        if min(self.key_bits, self.value_bits) < 8 and d % kv_cache.GROUP:
            raise DiffbitError(
                f"{NAME}: heads are {d} wide, wanted a multiple of {kv_cache.GROUP} for keys or values of 4 or 2 bits; "
                "use 8 bits"
            )

    @property
    def name(self) -> str:
        """The op's name."""
        return LOGITS_NAME if self.logit_bits else NAME

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the node's inputs, "" those that it has no use for."""
        return self._used(INPUTS)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self._used(OUTPUTS)

    def _used(self, names: tuple[str, ...]) -> tuple[str, ...]:
        most = {"scale": 8, "recent": 4}  # bits
        used = []
        for name in names:
            bits = self.key_bits if "key" in name else self.value_bits
            unused = bits > most.get(name.rpartition("_")[2], 16) or (name == "lambda" and self.branches == 1)
            used.append("" if unused else name)
        while not used[-1]:
            used.pop()
        return tuple(used)


def function(kind: Kind = Kind()) -> onnx_ir.Function:
    """The op's body as an ONNX model-local function: what runs wherever no native library is registered.

    A model's functions have names of their own, so all its nodes of one name are of one kind. The function declares as
    many inputs and outputs as the node has; ONNX Runtime inlines it if it makes all of them, those left out as well.
    """
    import onnx.parser
    from onnx_ir import serde

    inputs, outputs = INPUTS[: len(kind.inputs)], OUTPUTS[: len(kind.outputs)]
    return serde.deserialize_function(onnx.parser.parse_function(body(kind, inputs, outputs)))


class _Side(NamedTuple):
    """Keys or values in a call. Some tokens are at hand as codes and as floats: a query's place says which it reads."""

    presents: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # the buffer, its scale, the recent tokens
    codes: torch.Tensor  # [B, Hk, n, d]: the first n tokens
    scale: torch.Tensor  # of the codes: steps [B, Hk, n], or grids
    floats: torch.Tensor  # [B, Hk, m, d]: the last m tokens
    coded: torch.Tensor  # bool [S, T]: is read as a code


def _append(
    rows: torch.Tensor,
    past: torch.Tensor,
    scale: torch.Tensor | None,
    recent: torch.Tensor | None,
    past_length: int,
    bits: int,
    window: int,
    tokens: int,
) -> _Side:
    """New rows [B, Hk, S, d] behind the past. `tokens` share a grid: 32 of the keys, 1 of the values."""
    import torch

    total = past_length + rows.shape[2]
    places = range(past_length + 1, total + 1)  # each new token as the last

    def extended(past: torch.Tensor, length: int, new: torch.Tensor) -> torch.Tensor:
        return torch.cat((past[:, :, :length], new.to(past.dtype), past[:, :, length + new.shape[2] :]), 2)

    def coded(ends: list[int]) -> torch.Tensor:
        return torch.arange(total) < torch.tensor(ends)[:, None]

    if bits == 16:
        present = extended(past, past_length, rows)
        nothing = rows[:, :, :0]
        no_steps = nothing[..., 0].float()
        return _Side((present, None, None), nothing, no_steps, present[:, :, :total], coded([0 for _ in places]))
    if bits == 8:
        assert scale is not None
        codes, steps = kv_cache.round_rows(rows)
        present, scale = extended(past, past_length, codes), extended(scale, past_length, steps)
        codes, steps = present[:, :, :total], scale[:, :, :total]
        return _Side((present, scale, None), codes, steps, rows[:, :, :0], coded([total for _ in places]))
    assert scale is not None and recent is not None
    before, after = kv_cache.settled(past_length, window), kv_cache.settled(total, window)
    floats = torch.cat((recent[:, :, : past_length - before], rows.half()), 2)  # from `before` on
    round_grids = kv_cache.round_values if tokens == 1 else kv_cache.round_keys
    codes, grids = round_grids(floats[:, :, : after - before], bits)
    present = extended(past, before, kv_cache.pack(codes, bits))
    scale = extended(scale, before // tokens, grids)
    presents = (present, scale, extended(recent, 0, floats[:, :, after - before :]))
    codes, grids = kv_cache.unpack(present[:, :, :after], bits), scale[:, :, : after // tokens]
    return _Side(presents, codes, grids, floats, coded([kv_cache.settled(place, window) for place in places]))


def _restored(side: _Side, bits: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that a side's codes stand for: [B, Hk, n, d]."""
    if bits >= 8:
        return side.codes.to(dtype) * side.scale[..., None].to(dtype)
    return (kv_cache.restore_values if tokens == 1 else kv_cache.restore_keys)(side.codes, side.scale).to(dtype)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
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
    key_bits: int = 16,
    value_bits: int = 16,
    query_bits: int = 0,
    window: int = 0,
    logit_bits: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """The op in torch: inputs as in the module's docstring, past_length as a plain int. All seven outputs, None those
    that the kind has no use for.

    Computes in float32, or in float64 when `query` is float64 (then it is its own oracle's precision). What goes into
    a cache of another type than float64, and what a query's codes are made of, is computed in float32 in either case:
    integers and the cache's numbers are the same.
    """
    import torch
    from torch.nn.functional import pad

    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, steps, _ = query.shape
    d = key.shape[-1] // num_kv_heads
    Kind(key_bits, value_bits, query_bits, branches, logit_bits).check_width(d)
    width = 2 if wide_value else 1
    groups = num_kv_heads // width
    shared = num_heads // groups  # heads that read one kv head
    total = past_length + steps

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [B, S, heads, d]
        c, s = (table[position_ids].to(x.dtype).unsqueeze(2) for table in (cos, sin))
        low, high = x.chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    rows = key.to(torch.float64 if past_key.dtype == torch.float64 else torch.float32)
    rows = rotate(rows.view(batch, steps, num_kv_heads, d)).transpose(1, 2)  # [B, Hk, S, d]
    keys = _append(rows, past_key, past_key_scale, past_key_recent, past_length, key_bits, window, kv_cache.GROUP)
    rows = value.view(batch, steps, num_kv_heads, d).transpose(1, 2)
    values = _append(rows, past_value, past_value_scale, past_value_recent, past_length, value_bits, window, 1)

    q = query.to(torch.float32 if query_bits else dtype).view(batch, steps, branches * num_heads, d)
    q = (rotate(q) * scale).to(dtype).view(batch, steps, groups, shared, branches, d).permute(0, 4, 2, 3, 1, 5)
    q = q.reshape(batch, branches, groups, shared * steps, d)
    restored = _restored(keys, key_bits, kv_cache.GROUP, dtype)

    def of_branch(x: torch.Tensor, branch: int) -> torch.Tensor:  # [B, Hk, ...] -> [B, G, ...]
        return x.unflatten(1, (groups, width))[:, :, branch if wide_value else 0]

    def logits(branch: int) -> torch.Tensor:  # [B, G, r, S, T]
        codes, scales, numbers, floats = (
            of_branch(x, branch) for x in (keys.codes, keys.scale, restored, keys.floats.to(dtype))
        )
        if query_bits:
            if key_bits == 8:
                low = kv_cache.row_scores(q[:, branch], codes, scales, query_bits)
            else:
                low = kv_cache.grid_scores(q[:, branch], codes, scales, query_bits, key_bits)
        else:
            low = q[:, branch] @ numbers.transpose(-1, -2)
        high = q[:, branch] @ floats.transpose(-1, -2)
        low, high = pad(low, (0, total - low.shape[-1])), pad(high, (total - high.shape[-1], 0))
        low, high = (x.view(batch, groups, shared, steps, total) for x in (low, high))
        return torch.where(keys.coded, low, high)

    causal = torch.arange(total) <= torch.arange(past_length, total)[:, None]
    visible = (causal & attention_mask.bool()[:, None, :])[:, None, None]  # [B, 1, 1, S, T]
    shares = []
    for branch in range(branches):
        scores = logits(branch)
        if logit_bits:
            top = 2 ** (logit_bits - 1) - 1
            largest = scores.abs().masked_fill(~visible, 0).amax(-1, keepdim=True)
            step = (largest / top).masked_fill(largest == 0, 1)
            scores = (scores / step).round().clamp(-top, top) * step
        scores = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
        shares.append(torch.where(visible, scores, 0.0))  # a row that sees nothing is NaN until here
    weight = shares[0]
    if lam is not None:
        lam = lam.to(dtype).expand(batch, steps, num_heads)
        weight = weight - lam.view(batch, steps, groups, shared).permute(0, 2, 3, 1).unsqueeze(-1) * shares[1]

    restored = _restored(values, value_bits, 1, dtype)
    low = weight.masked_fill(~values.coded, 0)[..., : restored.shape[2]]
    high = weight.masked_fill(values.coded, 0)[..., total - values.floats.shape[2] :]
    out = torch.zeros((), dtype=dtype)
    for part, numbers in ((low, restored), (high, values.floats.to(dtype))):
        out = out + torch.einsum("bgrst,bgwtd->bsgrwd", part, numbers.unflatten(1, (groups, width)))
    out = out.reshape(batch, steps, num_heads, width * d)
    if norm_eps > 0:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps)
    out = out.reshape(batch, steps, num_heads * width * d).to(query.dtype)
    (key_buffer, *key_rest), (value_buffer, *value_rest) = keys.presents, values.presents
    rest = (part for pair in zip(key_rest, value_rest, strict=True) for part in pair)
    return out, key_buffer, value_buffer, *rest
