"""The body of DiffAttention in ONNX operators; ops/diff_attention.py specifies the op.

Shapes are in comments: n = branches, w = 1 + wide_value, G = kv heads that hold a value, r = H/G heads that share one.
In a cache of 4 or 2 bits, `before` tokens are codes before the call and `after` tokens after it; those in between are
available as codes and as floats.

With a sliding window, the `base` tokens before the first one that the call's first token sees are dropped, and
past_length, T, `before` and `after` count from there. With 4 and 2 bits, `base` is a multiple of 32.

There is one mask for all heads, and for S = 1 no tensor grows faster than T. It uses only widely supported operators,
for browsers too: no float16 arithmetic, and products of codes are computed in float32, exact up to 2^24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .body import Body, Value
from .kv_cache import BLOCK
from .signature import Type

if TYPE_CHECKING:
    from .diff_attention import Signature

END = 9223372036854775807

# Softmax attention over a float cache by ONNX Runtime's own operators. RoPE is a separate node: the one built into
# GroupQueryAttention reads only the first position of a prompt and counts on from there, so rows padded on the left
# would be cached at other positions than later steps expect. Every row has T tokens, padding included; a bias hides
# padding, and is finite, so that a query that sees nothing gives no NaN. ONNX Runtime computes values that do not
# depend on the layer once for all layers.
GROUPED_BODY = """
{
  one = Constant <value_ints = [1]> ()
  places = Constant <value_ints = [1, 2]> ()
  batch = Shape <start = 0, end = 1> (position_ids)
  length = Shape <start = 1> (position_ids)
  total = Shape <start = 1> (attention_mask)
  total_i = Cast <to = 6> (total)
  one_i = Cast <to = 6> (one)
  last = Sub (total_i, one_i)
  lengths = Expand (last, batch)
  total_0d = Squeeze (total_i)
  real = Cast <to = 9> (attention_mask)
  shown = Constant <value_float = 0.0> ()
  hidden = Constant <value_float = -65504.0> ()
  row = Where (real, shown, hidden)
  row_T = CastLike (row, query)
  rows = Unsqueeze (row_T, places)
  bias_shape = Concat <axis = 0> (batch, one, length, total)
  bias = Expand (rows, bias_shape)
  cos_T = CastLike (cos, query)
  sin_T = CastLike (sin, query)
  turned_query = com.microsoft.RotaryEmbedding (query, position_ids, cos_T, sin_T)
  turned_key = com.microsoft.RotaryEmbedding (key, position_ids, cos_T, sin_T)
  out, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads, kv_num_heads: int = @num_kv_heads, scale: float = @scale> (turned_query, turned_key, value, past_key, past_value, lengths, total_0d, , , , bias)
}
"""  # noqa: E501


class _Side(NamedTuple):
    """Keys or values of a call; fields that the cache's format does not have are None."""

    bits: int
    floats: Value | None = None  # [B, Hk, T, d]; with 4 or 2 bits [B, Hk, T - before, d]
    codes: Value | None = None  # float32 [B, Hk, T, d]; with 4 or 2 bits [B, Hk, after/32, 32, d]
    scale: Value | None = None  # [B, Hk, T]; with 4 or 2 bits, it and `zero` are [B, Hk, after/32, 1, d]
    zero: Value | None = None


def body(of: Signature) -> str:
    """Return the lines of the function for a signature."""
    return str(_DiffAttention(of))


class _DiffAttention(Body):
    visible: Value  # [B, 1, 1, S, T]
    coded: Value  # [S, after - before]: whether the call's token reads the other token's code
    before: Value
    after: Value
    newly: Value  # after - before

    def __init__(self, of: Signature) -> None:
        super().__init__()
        self.of = of
        self.one, self.rest = self.ints(1), self.ints(-1)
        query, self.past_length = self.input("query"), self.input("past_length")
        self.H = self("Reshape", self.attribute("num_heads"), self.one)
        self.Hk = self("Reshape", self.attribute("num_kv_heads"), self.one)
        self.w = self("Reshape", self.attribute("wide_value"), self.one) + self.one
        self.n = self.ints(of.branches)
        self.G = self.Hk / self.w
        self.r = self.H / self.G
        self.B, self.S = self.size(query, 0), self.size(query, 1)
        self.block, self.blockwise = self.ints(BLOCK), min(of.key_bits, of.value_bits) < 8
        self.base = self._base()
        if of.sliding_window:
            self.past_length = self.past_length - self.base
        self.T = self.past_length + self.S
        self.rS = self.r * self.S
        self.d = self.size(self.input("cos"), 1) * self.ints(2)
        self.zero_f, self.one_f = self.number(0), self.number(1)

        queries = self._in_pairs(self._rotate("query", self.rest))
        queries = self("Reshape", queries, self.dims(self.B, self.S, self.G, self.r, self.n, self.rest))
        queries = self("Transpose", queries, perm=[0, 2, 4, 3, 1, 5])
        queries = self("Reshape", queries, self.dims(self.B, self.G, self.n, self.rS, self.rest))
        self.queries = queries * self.attribute("scale", "float")  # [B, G, n, r*S, d]
        self._visible()
        if self.blockwise:
            self._lengths()
        if of.appends:
            value = self("Reshape", self.input("value"), self.dims(self.B, self.S, self.Hk, self.rest))
            rows = {"key": self._rotate("key", self.Hk), "value": value}
            rows = {name: self("Transpose", x, perm=[0, 2, 1, 3]) for name, x in rows.items()}  # [B, Hk, S, d]
            keys = self._append("key", rows["key"], of.key_bits)
            values = self._append("value", rows["value"], of.value_bits)
        else:
            keys, values = self._as_it_lies("key", of.key_bits), self._as_it_lies("value", of.value_bits)
        for name in of.declared_outputs:
            if name not in of.outputs:  # a function must compute all declared outputs
                self("Constant", value_float=0.0, name=name)
        self._finish(self._mixed(self._weights(self._scores(keys)), values))

    # ---- the new tokens ----

    def _rotate(self, name: str, heads: Value) -> Value:
        """Apply RoPE to query or key [B, S, heads, d]."""
        tables = (self("Gather", self.input(table), self.input("position_ids"), axis=0) for table in ("cos", "sin"))
        cos, sin = (self("Unsqueeze", table, self.ints(2)) for table in tables)
        x = self("Reshape", self.cast(self.input(name), Type.FLOAT32), self.dims(self.B, self.S, heads, self.d))
        low, high = self.split(x, -1, 2)
        return self("Concat", low * cos - high * sin, high * cos + low * sin, axis=-1)

    def _in_pairs(self, query: Value) -> Value:
        """Repeat every noise head for each of its signal heads: [B, S, H/R, R, n, d]."""
        if (ratio := self.of.noise_ratio) == 1:
            return query
        groups = self("Reshape", query, self.dims(self.B, self.S, self.rest, self.ints(ratio + 1), self.d))
        signal, noise = self.split(groups, 3, [self.ints(ratio), self.one])
        noise = self("Expand", noise, self.ints(1, 1, 1, ratio, 1))
        return self("Concat", *(self("Unsqueeze", part, self.ints(4)) for part in (signal, noise)), axis=4)

    def _base(self) -> Value:
        """Return the number of tokens that no query sees and, with 4 and 2 bits, that are already quantized."""
        none = self.ints(0)
        if not self.of.sliding_window:
            return none
        base = self("Max", self.past_length - self.ints(self.of.sliding_window - 1), none)
        if not self.blockwise:
            return base
        return self("Min", base / self.block * self.block, self._quantized_tokens(self.past_length)[1])

    def _visible(self) -> None:
        """Compute one mask for all heads: causal in the cache's order, without padding."""
        zero_0d, one_0d = self("Constant", value_int=0), self("Constant", value_int=1)
        total, length = (self("Squeeze", x, self.ints(0)) for x in (self.T, self.S))
        self.key_index = self("Range", zero_0d, total, one_0d)
        query_index = self("Range", zero_0d, length, one_0d) + self.past_length
        self.query_index = self("Unsqueeze", query_index, self.one)
        causal, mask = self("LessOrEqual", self.key_index, self.query_index), self.input("attention_mask")
        if window := self.of.sliding_window:
            causal = self("And", causal, self("Less", self.query_index, self.key_index + self.ints(window)))
            mask = self.slice(mask, self.base, self.ints(END), 1)
        seen = self("Unsqueeze", self.cast(mask, 9), self.ints(1, 2))
        self.visible = self("Unsqueeze", self("And", causal, seen), self.one)

    def _lengths(self) -> None:
        """Compute the lengths that keys and values of 4 and 2 bits share."""
        self.d_blocks = self.d / self.block
        before = self.past_length if self.of.appends else self.T
        self.before_blocks, self.before = self._quantized_tokens(before)
        self.after_blocks, self.after = self._quantized_tokens(self.T)
        _, end_of_query = self._quantized_tokens(self.query_index + self.one)
        self.newly = self.after - self.before
        self.recent_past, self.recent_present = before - self.before, self.T - self.after
        self.coded = self("Less", self.slice(self.key_index, self.before, self.after, 0), end_of_query)

    def _quantized_tokens(self, count: Value) -> tuple[Value, Value]:
        """Return how many of `count` tokens are codes: in blocks, and in tokens."""
        window = self("Reshape", self.attribute("window"), self.one)
        blocks = self("Max", count - window, self.ints(0)) / self.block
        return blocks, blocks * self.block

    # ---- the cache ----

    def _append(self, name: str, rows: Value, bits: int) -> _Side:
        if bits < 8:
            return self._append_blocks(name, rows, bits)
        if bits == 16:
            new = self("CastLike", rows, self.input(f"past_{name}"))
            return _Side(bits, floats=self.cast(self._grow(name, new), Type.FLOAT32))
        scale, codes = self._quantize_rows(self.cast(rows, Type.FLOAT32), 3, bits)
        codes = self.cast(self._grow(name, self.cast(codes, Type.INT8)), Type.FLOAT32)
        return _Side(bits, codes=codes, scale=self._grow(f"{name}_scale", self("Squeeze", scale, self.rest)))

    def _as_it_lies(self, name: str, bits: int) -> _Side:
        """Read the presents of another node."""
        held = self.T if bits >= 8 else self.after
        buffer = self.slice(self.input(f"past_{name}"), self.ints(0), held, 2)
        if bits == 16:
            return _Side(bits, floats=self.cast(buffer, Type.FLOAT32))
        scales = self.after_blocks if bits < 8 else held
        scale = self.slice(self.input(f"past_{name}_scale"), self.ints(0), scales, 2)
        if bits == 8:
            return _Side(bits, codes=self.cast(buffer, Type.FLOAT32), scale=scale)
        recent = self.slice(self.input(f"past_{name}_recent"), self.ints(0), self.recent_present, 2)
        return self._blockwise(bits, self.cast(recent, Type.FLOAT32), buffer, scale)

    def _grow(self, name: str, new: Value, old_length: Value | None = None, length: Value | None = None) -> Value:
        """Return a buffer's first `length` tokens, past and `new`, and make the present, which keeps those behind."""
        past, end = self.input(f"past_{name}"), self.ints(END)
        if self.of.sliding_window:
            bits = self.of.key_bits if "key" in name else self.of.value_bits
            base = self.base / self.block if "scale" in name and bits < 8 else self.base
            return self._turn(name, new, base, base + (old_length or self.past_length), base + (length or self.T))
        held = self.slice(past, self.ints(0), old_length or self.past_length, 2)
        found = self("Concat", held, new, axis=2)
        self("Concat", found, self.slice(past, length or self.T, end, 2), axis=2, name=f"present_{name}")
        return found

    def _turn(self, name: str, new: Value, base: Value, held: Value, total: Value) -> Value:
        """Do the same for a ring: return the entries base .. total in order, of which the past has up to `held`."""
        past = self.input(f"past_{name}")
        slots = self.size(past, 2)
        both = self("Concat", past, new, axis=2)
        zero, one = self("Constant", value_int=0), self("Constant", value_int=1)
        first, end, ring = (self("Squeeze", x, self.ints(0)) for x in (base, total, slots))
        entry = self("Range", first, end, one)
        found = self("Where", self("Less", entry, held), self("Mod", entry, slots), entry - held + slots)
        slot = self("Range", zero, ring, one)
        last = total - self.one  # the last of all entries; below, the last in each slot
        entry = last - self("Mod", last - slot, slots)
        kept = self("Where", self("Less", entry, held), slot, entry - held + slots)
        self("Gather", both, kept, axis=2, name=f"present_{name}")
        return self("Gather", both, found, axis=2)

    def _quantize_rows(self, x: Value, axis: int, bits: int) -> tuple[Value, Value]:
        """Quantize rows x [..., d] of float32 -> scales [..., 1] and codes [..., d], integers in float32.

        `axis` is the last one, as a positive number: without rows, ONNX Runtime (1.18, 1.31) does not reduce a negative
        axis.
        """
        top = self.number(2 ** (bits - 1) - 1)
        largest = self("ReduceMax", self("Abs", x), self.ints(axis), keepdims=1)
        scale = largest / top
        return scale, self("Clip", self("Round", x / self._divisor(scale)), self("Neg", top), top)

    def _divisor(self, scale: Value) -> Value:
        return self("Where", self("Equal", scale, self.zero_f), self.one_f, scale)

    def _append_blocks(self, name: str, rows: Value, bits: int) -> _Side:
        """Append rows of 4 or 2 bits."""
        past, newly, end = self.input(f"past_{name}_recent"), self.newly, self.ints(END)
        recent = self.slice(past, self.ints(0), self.recent_past, 2)
        recent = self("Concat", recent, self.cast(rows, Type.FLOAT16), axis=2)
        kept, behind = self.slice(recent, newly, end, 2), self.slice(past, self.recent_present, end, 2)
        self("Concat", kept, behind, axis=2, name=f"present_{name}_recent")
        floats = self.cast(recent, Type.FLOAT32)

        new = self.slice(floats, self.ints(0), newly, 2)
        new = self.view(new, self.B, self.Hk, newly / self.block, self.block, self.d)
        top, axis = self.number(2**bits - 1), self.ints(3)
        zero, largest = (self(op, new, axis, keepdims=1) for op in ("ReduceMin", "ReduceMax"))
        scale_half, zero_half = (self.cast(x, Type.FLOAT16) for x in ((largest - zero) / top, zero))
        codes = (new - zero) / self._divisor(self.cast(scale_half, Type.FLOAT32))
        codes = self("Clip", self("Round", codes), self.zero_f, top)
        both = self("Concat", scale_half, zero_half, axis=3)  # [B, Hk, newly/32, 2, d]
        both = self._grow(f"{name}_scale", both, self.before_blocks, self.after_blocks)
        packed = self._grow(name, self._pack(codes, bits), self.before, self.after)
        return self._blockwise(bits, floats, packed, both)

    def _blockwise(self, bits: int, floats: Value, packed: Value, both: Value) -> _Side:
        """Return a side of `after` tokens in blocks from bytes, and scales and zero points."""
        scale, zero = self.split(self.cast(both, Type.FLOAT32), 3, 2)
        codes = self.cast(self._unpack(packed, bits), Type.FLOAT32)
        codes = self.view(codes, self.B, self.Hk, self.after_blocks, self.block, self.d)
        return _Side(bits, floats, codes, scale, zero)

    def _pack(self, codes: Value, bits: int) -> Value:
        """Return bytes [B, Hk, tokens, d*bits/8]. Channels that differ only in the second-last index of
        [B, Hk, tokens, d/32, 8/bits, 4*bits] share a byte."""
        places, width = 8 // bits, self.ints(4 * bits)
        parts = self.view(codes, self.B, self.Hk, self.newly, self.d_blocks, self.ints(places), width)
        weights = self("Reshape", self.ints(*(1 << i * bits for i in range(places))), self.ints(places, 1))
        packed = self("ReduceSum", parts * self.cast(weights, Type.FLOAT32), self.ints(4), keepdims=0)
        packed = self.view(packed, self.B, self.Hk, self.newly, self.d_blocks * width)
        return self.cast(packed, Type.UINT8)

    def _unpack(self, packed: Value, bits: int) -> Value:
        """Return codes uint8 [blocks, 32]: one shift per place, in two dimensions, which takes half the time of one
        broadcasting BitShift."""
        mask, fields = self.cast(self.ints(2**bits - 1), Type.UINT8), []
        packed = self.view(packed, self.rest, self.ints(4 * bits))
        for i in range(8 // bits):
            field = packed
            if i:
                field = self("BitShift", packed, self.cast(self.ints(i * bits), Type.UINT8), direction="RIGHT")
            fields.append(field if (i + 1) * bits == 8 else self("BitwiseAnd", field, mask))  # the last needs none
        return self("Concat", *fields, axis=1)

    def _dequantized(self, side: _Side) -> Value:
        """[B, G, w, after, d]."""
        assert side.codes and side.scale and side.zero
        return self.view(side.codes * side.scale + side.zero, self.B, self.G, self.w, self.after, self.d)

    # ---- scores ----

    def _scores(self, keys: _Side) -> Value:
        """[B, G, n, r, S, T], before any mask."""
        shape = (self.B, self.G, self.n, self.r, self.S)
        if keys.bits >= 8:
            return self("Reshape", self._row_scores(keys), self.dims(*shape, self.T))
        assert keys.floats
        # codes below `before`, floats from `after` on, and in between depending on the query's position
        if self.of.query_bits:
            low = self._block_scores(keys)
        else:
            low = self.queries @ self("Transpose", self._dequantized(keys), perm=[0, 1, 2, 4, 3])
        low, high = self.view(low, *shape, self.after), self._products(self.queries, keys.floats)
        high = self("Reshape", high, self.dims(*shape, self.rest))
        before, newly_low = self.split(low, -1, [self.before, self.newly])
        newly_high, after = self.split(high, -1, [self.newly, self.recent_present])
        return self("Concat", before, self("Where", self.coded, newly_low, newly_high), after, axis=-1)

    def _products(self, queries: Value, keys: Value) -> Value:
        """Multiply [B, G, n, r*S, d] by [B, G, w, d, keys]; with w = 1 the branches share the key."""
        keys = self("Reshape", keys, self.dims(self.B, self.G, self.w, self.rest, self.d))
        return queries @ self("Transpose", keys, perm=[0, 1, 2, 4, 3])

    def _row_scores(self, keys: _Side) -> Value:
        if keys.floats:
            return self._products(self.queries, keys.floats)
        assert keys.codes and keys.scale
        key_scale = self("Reshape", keys.scale, self.dims(self.B, self.G, self.w, self.one, self.rest))
        if not self.of.query_bits:
            return self._products(self.queries, keys.codes) * key_scale
        scale, codes = self._quantize_rows(self.queries, 4, self.of.query_bits)
        return self._products(codes, keys.codes) * scale * key_scale

    def _block_scores(self, keys: _Side) -> Value:
        """Fold the scales of a block of 32 keys into the query: [B, G, n, blocks, r*S, d] x [B, G, w, blocks, d, 32].
        The zero points are multiplied with the unrounded query, [B, G, w, blocks, d] x [B, G, n, d, r*S], and the
        middle of a key's codes with the query's rounding error."""
        assert keys.codes and keys.scale and keys.zero
        blocks = (self.B, self.G, self.w, self.after_blocks)
        codes = self("Transpose", self.view(keys.codes, *blocks, self.block, self.d), perm=[0, 1, 2, 3, 5, 4])
        scaled = self("Unsqueeze", self.queries, self.ints(3)) * self.view(keys.scale, *blocks, self.one, self.d)
        scale, rounded = self._quantize_rows(scaled, 5, self.of.query_bits)
        at_zero = self.view(keys.zero, *blocks, self.d) @ self("Transpose", self.queries, perm=[0, 1, 2, 4, 3])
        lost = self("ReduceSum", scaled - rounded * scale, self.ints(5), keepdims=1)
        middle = self.number((2**keys.bits - 1) / 2)
        scores = rounded @ codes * scale + (self("Unsqueeze", at_zero, self.rest) + lost * middle)
        return self("Transpose", scores, perm=[0, 1, 2, 4, 3, 5])

    def _weights(self, scores: Value) -> Value:
        """Return A1 - lambda A2 [B, G, r, S, T]; 0 for a row that sees nothing."""
        visible = self("Unsqueeze", self.visible, self.one)
        shares = self("Softmax", self("Where", visible, scores, self.number(-1e30)), axis=-1)
        if self.of.branches == 1:
            return self("Where", self.visible, self("Squeeze", shares, self.ints(2)), self.zero_f)
        branches = self.split(shares, 2, 2)
        signal, noise = (self("Squeeze", branch, self.ints(2)) for branch in branches)
        by = self("Expand", self.cast(self.input("lambda"), Type.FLOAT32), self.ints(1, 1, 1))
        by = self("Reshape", by, self.dims(self.ints(0), self.ints(0), self.G, self.r))  # 0: unchanged
        by = self("Unsqueeze", self("Transpose", by, perm=[0, 2, 3, 1]), self.rest)
        return self("Where", self.visible, signal - noise * by, self.zero_f)

    # ---- values ----

    def _mixed(self, weights: Value, values: _Side) -> Value:
        """[B, G, w, r*S, d]."""
        if values.bits == 16:
            assert values.floats
            return self._mix(weights, values.floats, self.T)
        if values.bits == 8:
            assert values.codes and values.scale
            scale = self("Reshape", values.scale, self.dims(self.B, self.G, self.w, self.one, self.T))
            weights = self("Reshape", weights, self.dims(self.B, self.G, self.one, self.rS, self.T))
            return weights * scale @ self("Reshape", values.codes, self.dims(self.B, self.G, self.w, self.T, self.d))
        assert values.floats
        before, newly, after = self.split(weights, -1, [self.before, self.newly, self.recent_present])
        low = self("Concat", before, self("Where", self.coded, newly, self.zero_f), axis=-1)
        high = self("Concat", self("Where", self.coded, self.zero_f, newly), after, axis=-1)
        return self._mix(low, self._dequantized(values), self.after) + self._mix(
            high, values.floats, self.T - self.before
        )

    def _mix(self, weights: Value, values: Value, tokens: Value) -> Value:
        """[B, G, r, S, tokens] x [B, G, w, tokens, d]: one product for both halves of a wide value."""
        weights = self.view(weights, self.B, self.G, self.one, self.rS, tokens)
        return weights @ self.view(values, self.B, self.G, self.w, tokens, self.d)

    def _finish(self, mixed: Value) -> None:
        """Put the heads in order and apply the norm over the w*d numbers of a head."""
        mixed = self("Reshape", mixed, self.dims(self.B, self.G, self.w, self.r, self.S, self.rest))
        mixed = self("Transpose", mixed, perm=[0, 4, 1, 3, 2, 5])
        heads = self("Reshape", mixed, self.dims(self.B, self.S, self.H, self.rest))
        eps = self.attribute("norm_eps", "float")
        mean = self("ReduceMean", heads * heads, self.rest, keepdims=1)
        normed = heads / self("Sqrt", mean + eps)
        out = self("Where", self("Greater", eps, self.zero_f), normed, heads)
        out = self("Reshape", out, self.dims(self.B, self.S, self.rest))
        self("CastLike", out, self.input("query"), name="out")
