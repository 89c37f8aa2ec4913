"""`diffbit.DiffAttention`: RoPE, cache append, differential attention and head norm in one op.

For every pair (i) of query sub-heads, with d the width of one softmax and T = past_length + S:

    A1 = softmax(scale * q_{2i}   k_s^T)        A2 = softmax(scale * q_{2i+1} k_n^T)
    o  = (A1 - lambda_i * A2) v                 out = o / sqrt(mean(o^2) + norm_eps)   (norm_eps 0: no norm)

Version 1 (arXiv 2410.05258, eq. 1-3; wide_value=1): the cache holds Hk = 2*KV sub-heads; pair i belongs to kv head
g = i // (H/KV), k_s and k_n are the key sub-heads 2g and 2g+1, and v is the concatenation of the value sub-heads 2g and
2g+1, 2d wide. Version 2 (hf.co/blog/microsoft/diff-attn-v2; wide_value=0): Hk = KV, both branches of a pair share
the key and the d-wide value of kv head g = i // (H/Hk), lambda is a number per token and head, and there is no norm.
A plain Transformer (branches=1, wide_value=0): one query sub-head per head, o = A1 v, no lambda.
Grouped (arXiv 2510.06949; noise_ratio=R): R neighbouring signal heads share one noise head, so A2 of pair i is that of
noise head i // R. The query has H + H/R sub-heads, in groups of R signal heads followed by their noise head; R = 1
gives pairs. R divides H/G, the pairs of a kv head.

Not in the op: (1 - lambda_init), which is folded into the output projection, and the computation of lambda.

Inputs; n = branches
    query           T  [B, S, (H + H/R)*d], with n = 1 [B, S, H*d]    in pairs: 2i signal, 2i+1 noise; not yet rotated
    key, value      T  [B, S, Hk*d]; without them the node appends nothing ("Query-only", below)
    lambda          float [H], or [B, S, H] (after the sigmoid); omitted if n = 1
    past_key/value  [B, Hk, C, ..]     the cache, below
    past_length     int64 [1], or [B]: "Rows of their own length", below
    position_ids    int64 [B, S]       rows of cos and sin
    cos, sin        float [P, d/2]     rotate-half RoPE: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    attention_mask  int64 [B, T]       0 hides a key (padding); token s sees keys 0..past_length+s that are not hidden,
                                       with a sliding window of n the last n of them
    past_key/value_scale, past_key/value_recent        the cache, below
    gates           float [B, S, H]    of a mixture of heads, "Gates", below; omitted: 1 everywhere
Outputs
    out             T  [B, S, H*(1+wide_value)*d]; zero where a token sees no key at all
    present_key/value, present_key/value_scale, present_key/value_recent
T is float32 or float16. Inputs and outputs that a node does not need have empty names, or are omitted at the end
(`Signature.inputs`, `Signature.outputs`).

The cache. key_bits and value_bits set the formats of keys and values independently, by the rules of kv_cache.py:

    bits    key / value             scale                                               recent
    16      T, or float32, float16  -                                                   -
            [B, Hk, C, d]
    8       int8 [B, Hk, C, d]      float16 [B, Hk, C]: a scale a row                   -
    4, 3, 2 uint8                   float16 [B, Hk, C]: a scale a row                   float16
            [B, Hk, C, d*bits/8]                                                        [B, Hk, R, d]

Keys are cached after RoPE, which rounds both products and their difference to float32. Rows of a sub-head below 16 bits
are quantized after the Hadamard transform, from float32 numbers (8 bits) or float16 numbers (4, 3 and 2). Contents of a
buffer beyond its tokens are never read as numbers.

16 and 8 bits: the past buffer holds past_length tokens, C >= past_length; the present [B, Hk, max(C, T), ..] holds T.
If C < T it grows; otherwise it has the same capacity, and past and present may share memory. Entries behind the T
tokens are the past's.

4, 3 and 2 bits: with quantized(t) = max(0, t - window) // 32 * 32, the buffer holds the first quantized(past_length)
tokens, C >= quantized(past_length), a multiple of 32 like d. `recent` holds rows in float16, rotated: the first `first`
tokens; of keys then the offset; then the residual window, window + 32 slots, which has the tokens that are not
quantized, token quantized(past_length) + i in its slot i. So R = first + window + 32, and one more for keys. The
present holds quantized(T) tokens in max(C, quantized(T)), and its recent the others; further slots of present_recent
are undefined. The offset is computed when the first block is quantized; until then its slot is undefined. So in a call
the tokens before quantized(T) exist as codes, those from quantized(past_length) on, old and new, as float16, and those
in between as both. Token s reads

    key or value j of token s:  from its code if first <= j < quantized(past_length + s + 1), else as float16

as it would if the tokens came one by one. So neither the cache nor the output depends on how a prompt is split into
calls, except for the rounding of float32 sums. Padding is treated like other tokens: it can be among the first tokens,
and among those of the offset.

Sliding window (sliding_window n > 0): a token sees itself and the n - 1 before it, and the cache is a ring, which never
grows: [B, Hk, R, ..] with R = `kv_cache.ring_rows`, n tokens or, below 8 bits, the blocks of 32 that contain n; first
is 0. Token t is in slot t mod R, and so is its scale; the recent tokens are not a ring, and all rules above hold. A
call sees the tokens in the ring and its own; afterwards the ring holds the last R of the tokens that it stores. A
window that no context exceeds gives bit for bit the same result as no window.

Query-only: `past_key`, ... are the presents of another node without a sliding window, which hold the T tokens, the last
S of which are the queries; past_length is T - S. There are no presents. A low-bit cache is read as stored: the tokens
before quantized(T), but for the first, from their codes, whatever the query's position.

Rows of their own length (past_length [B]): row b is computed as if it were alone, after past_length[b] tokens; a row
with a number below 0 is left alone, and its output is zero. The attention mask has at least as many columns as the
longest row has tokens; a row reads the first of them. Only kernels on a CPU do this, for few new tokens, and only where
past and present share memory; the body takes one length.

Query bits (query_bits 8 or 4; key_bits below 16): products with codes of keys are integer products. The query, after
RoPE, multiplied by scale and rotated if the keys are, each operation rounded to float32, is quantized per row
(`kv_cache.row_scores`). The int32 dot product of its codes and the keys' levels is exact, followed, in float32, by

    dot * query's scale * key's scale (+ query . offset)

Products with float16 keys are float32. query_bits 0: the float32 query is multiplied with float32 keys,
level * scale (+ offset).

Gates: the result of each head is multiplied by the token's gate, in float32, after the norm and before it is rounded to
T. Where a gate is 0, out is 0 whatever the head would be, and kernels do not compute it: a head that is off (with two
branches both of the pair, but for a noise head that another pair needs) has no scores and reads no keys and values. The
keys and values that several heads share are read unless all of them are off. New ones are appended in any case.

Attributes: num_heads (H), num_kv_heads (Hk), branches, noise_ratio (R), wide_value, scale, norm_eps, key_bits,
value_bits, query_bits, window and first (read below 8 bits only), sliding_window, spec_version.

Integers (codes, packed bytes, dot products) and the scales and offsets of the cache are bit-identical in every
implementation, except for the sign of zero. An infinite or NaN number makes its row NaN in the reference and in
kernels; the body does not define it. All other arithmetic is in float32, whatever T is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..io.errors import DiffbitError
from . import kv_cache, schema

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
    gates: bool = False  # of a mixture of heads

    def __post_init__(self) -> None:
        for attribute in OP.attributes:
            if hasattr(self, attribute.name):
                attribute.check(OP.name, getattr(self, attribute.name))
        if self.query_bits and self.key_bits == 16:
            raise DiffbitError(
                f"{OP.name}: query_bits is {self.query_bits} and key_bits 16, wanted keys of fewer bits for an "
                "integer product"
            )
        if self.branches == 1 and self.noise_ratio > 1:
            raise DiffbitError(f"{OP.name}: noise_ratio is {self.noise_ratio} and branches 1, wanted 2 branches")
        if self.sliding_window and not self.appends:
            raise DiffbitError(f"{OP.name}: sliding_window is {self.sliding_window}, wanted 0 without key and value")

    def check_width(self, d: int) -> None:
        """Raise DiffbitError if heads of this width cannot be cached."""
        if min(self.key_bits, self.value_bits) < 8 and d % kv_cache.BLOCK:
            raise DiffbitError(
                f"{OP.name}: heads are {d} wide, wanted a multiple of {kv_cache.BLOCK} for keys or values of fewer "
                "than 8 bits; use 8 bits"
            )

    @property
    def attributes(self) -> dict[str, int]:
        """Return the node's attributes that the signature determines."""
        names = (field.name for field in fields(self) if field.name not in ("appends", "gates"))
        return {name: getattr(self, name) for name in names}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the node's inputs; "" for those that it does not need."""
        return self._used(INPUTS)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self._used(OUTPUTS)

    @property
    def declared_outputs(self) -> tuple[str, ...]:
        """Names of the function's outputs: as many as the node has, including omitted ones."""
        return OUTPUTS[: len(self.outputs)]

    def _used(self, names: tuple[str, ...]) -> tuple[str, ...]:
        most = {"scale": 8, "recent": 4}  # bits
        used = []
        for name in names:
            bits = self.key_bits if "key" in name else self.value_bits
            unused = bits > most.get(name.rpartition("_")[2], 16) or (name == "lambda" and self.branches == 1)
            unused |= name == "gates" and not self.gates
            new = name in ("key", "value") or name.startswith("present")
            used.append("" if unused or (new and not self.appends) else name)
        while not used[-1]:
            used.pop()
        return tuple(used)
