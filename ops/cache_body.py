"""The part of an attention's body that appends to a cache and reads it, in ONNX operators. ops/diff_attention.py says
what a cache holds; diff_attention_body.py and latent_attention.py are bodies.

Shapes are in comments: n = branches, w = 1 + wide_value, G = kv heads that hold a value, r = H/G heads that share one.
In a cache of 4 or 2 bits, `before` tokens are codes before the call and `after` tokens after it; those in between are
available as codes and as floats.

With a sliding window, the `base` tokens before the first one that the call's first token sees are dropped, and
past_length, T, `before` and `after` count from there. With 4 and 2 bits, `base` is a multiple of 32.

There is one mask for all heads, and for S = 1 no tensor grows faster than T: the cost of a decode step is linear in the
context. It uses only widely supported operators, for browsers too: no float16 arithmetic, and products of codes are
computed in float32, exact up to 2^24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .body import END, Nodes, Operand, Value
from .kv_cache import BLOCK
from .signature import Type

if TYPE_CHECKING:
    from .diff_attention import Signature


class Side(NamedTuple):
    """Keys or values of a call; fields that the cache's format does not have are None."""

    bits: int
    floats: Value | None = None  # [B, Hk, T, d]; with 4 or 2 bits [B, Hk, T - before, d]
    codes: Value | None = None  # float32 [B, Hk, T, d]; with 4 or 2 bits [B, Hk, after/32, 32, d]
    scale: Value | None = None  # [B, Hk, T]; with 4 or 2 bits, it and `zero` are [B, Hk, after/32, 1, d]
    zero: Value | None = None


class CacheBody:
    """The nodes of one attention for a signature. A subclass sets the sizes below (int64 [1]), then calls `_begin`,
    `_visible`, `_lengths` if it is `blockwise`, `_append` or `_read`, `_scores`, `_mixed`."""

    H: Value  # heads
    Hk: Value  # heads of the cache
    w: Value | int
    n: Value | int
    G: Value | int
    r: Value
    queries: Value  # [B, G, n, r*S, d], rotated and scaled

    def __init__(self, of: Signature, op: Nodes) -> None:
        self.of, self.op = of, op
        self.inputs = {value.name: value for value in op.inputs}
        self.outputs: dict[str, Value] = {}

    def _begin(self) -> None:
        """Compute the lengths of the call."""
        query, self.past_length = self.inputs["query"], self.inputs["past_length"]
        self.B, self.S = query.size(0), query.size(1)
        self.block, self.blockwise = self.op.ints(BLOCK), min(self.of.key_bits, self.of.value_bits) < 8
        self.base = self._base()
        if self.of.sliding_window:
            self.past_length = self.past_length - self.base
        self.T = self.past_length + self.S
        self.rS = self.r * self.S
        self.d = self._width()
        self.zero_f, self.one_f = self.op.number(0), self.op.number(1)

    def _width(self) -> Value:
        """Return the width of a row of the cache."""
        return self.inputs["cos"].size(1) * 2

    # ---- the new tokens ----

    def _rotate(self, name: str, heads: Operand) -> Value:
        """Apply RoPE to query or key [B, S, heads, d]."""
        rows = self.inputs["position_ids"]
        tables = (self.op("Gather", self.inputs[table], rows, axis=0) for table in ("cos", "sin"))
        cos, sin = (table.unsqueeze(2) for table in tables)
        x = self.inputs[name].cast(Type.FLOAT32).reshape(self.B, self.S, heads, self.d)
        low, high = self.op.split(x, -1, 2)
        return self.op("Concat", low * cos - high * sin, high * cos + low * sin, axis=-1)

    def _base(self) -> Value:
        """Return the number of tokens that no query sees and, with 4 and 2 bits, that are already quantized."""
        none = self.op.ints(0)
        if not self.of.sliding_window:
            return none
        base = self.op("Max", self.past_length - (self.of.sliding_window - 1), none)
        if not self.blockwise:
            return base
        return self.op("Min", base / self.block * self.block, self._quantized_tokens(self.past_length)[1])

    def _visible(self) -> None:
        """Compute one mask for all heads: causal in the cache's order, without padding."""
        zero, one = self.op.scalar(0), self.op.scalar(1)
        total, length = self.T.squeeze(0), self.S.squeeze(0)
        self.key_index = self.op("Range", zero, total, one)
        self.query_index = (self.op("Range", zero, length, one) + self.past_length).unsqueeze(1)
        causal, mask = self.op("LessOrEqual", self.key_index, self.query_index), self.inputs["attention_mask"]
        if window := self.of.sliding_window:
            causal = self.op("And", causal, self.op("Less", self.query_index, self.key_index + window))
            mask = mask.slice(self.base, END, 1)
        seen = mask.cast(Type.BOOL).unsqueeze(1, 2)
        self.visible = self.op("And", causal, seen).unsqueeze(1)  # [B, 1, 1, S, T]

    def _lengths(self) -> None:
        """Compute the lengths that keys and values of 4 and 2 bits share."""
        self.d_blocks = self.d / self.block
        before = self.past_length if self.of.appends else self.T
        self.before_blocks, self.before = self._quantized_tokens(before)
        self.after_blocks, self.after = self._quantized_tokens(self.T)
        _, end_of_query = self._quantized_tokens(self.query_index + 1)
        self.newly = self.after - self.before
        self.recent_past, self.recent_present = before - self.before, self.T - self.after
        # [S, after - before]: whether the call's token reads the other token's code
        self.coded = self.op("Less", self.key_index.slice(self.before, self.after, 0), end_of_query)

    def _quantized_tokens(self, count: Value) -> tuple[Value, Value]:
        """Return how many of `count` tokens are codes: in blocks, and in tokens."""
        blocks = self.op("Max", count - self.op.dim("window"), 0) / self.block
        return blocks, blocks * self.block

    # ---- the cache ----

    def _append(self, name: str, rows: Value, bits: int) -> Side:
        if bits < 8:
            return self._append_blocks(name, rows, bits)
        if bits == 16:
            new = rows.like(self.inputs[f"past_{name}"])
            return Side(bits, floats=self._grow(name, new).cast(Type.FLOAT32))
        scale, codes = self._quantize_rows(rows.cast(Type.FLOAT32), 3, bits)
        codes = self._grow(name, codes.cast(Type.INT8)).cast(Type.FLOAT32)
        return Side(bits, codes=codes, scale=self._grow(f"{name}_scale", scale.squeeze(-1)))

    def _read(self, name: str, bits: int) -> Side:
        """Read the presents of another node."""
        tokens = self.T if bits >= 8 else self.after
        buffer = self.inputs[f"past_{name}"].slice(0, tokens, 2)
        if bits == 16:
            return Side(bits, floats=buffer.cast(Type.FLOAT32))
        scale = self.inputs[f"past_{name}_scale"].slice(0, tokens if bits == 8 else self.after_blocks, 2)
        if bits == 8:
            return Side(bits, codes=buffer.cast(Type.FLOAT32), scale=scale)
        recent = self.inputs[f"past_{name}_recent"].slice(0, self.recent_present, 2)
        return self._blockwise(bits, recent.cast(Type.FLOAT32), buffer, scale)

    def _grow(self, name: str, new: Value, old_length: Value | None = None, length: Value | None = None) -> Value:
        """Return a buffer's first `length` tokens, past and `new`, and make the present, which keeps those behind."""
        past, end = self.inputs[f"past_{name}"], self.op.ints(END)
        old_length, length = old_length or self.past_length, length or self.T
        if self.of.sliding_window:
            bits = self.of.key_bits if "key" in name else self.of.value_bits
            base = self.base / self.block if "scale" in name and bits < 8 else self.base
            return self._turn(name, new, base, base + old_length, base + length)
        tokens = self.op("Concat", past.slice(0, old_length, 2), new, axis=2)
        self.outputs[f"present_{name}"] = self.op("Concat", tokens, past.slice(length, end, 2), axis=2)
        return tokens

    def _turn(self, name: str, new: Value, base: Value, old_end: Value, end: Value) -> Value:
        """Do the same for a ring: return the entries base .. end in order, of which the past has those before
        `old_end`."""
        op, past = self.op, self.inputs[f"past_{name}"]
        slots = past.size(2)
        both = op("Concat", past, new, axis=2)
        zero, one = op.scalar(0), op.scalar(1)
        first, stop, ring = base.squeeze(0), end.squeeze(0), slots.squeeze(0)
        entry = op("Range", first, stop, one)
        in_order = op("Where", op("Less", entry, old_end), op("Mod", entry, slots), entry - old_end + slots)
        slot = op("Range", zero, ring, one)
        last = end - 1  # the last of all entries; below, the last in each slot
        entry = last - op("Mod", last - slot, slots)
        kept = op("Where", op("Less", entry, old_end), slot, entry - old_end + slots)
        self.outputs[f"present_{name}"] = op("Gather", both, kept, axis=2)
        return op("Gather", both, in_order, axis=2)

    def _quantize_rows(self, x: Value, axis: int, bits: int) -> tuple[Value, Value]:
        """Quantize rows x [..., d] of float32 -> scales [..., 1] and codes [..., d], integers in float32.

        `axis` is the last one, as a positive number: without rows, ONNX Runtime (1.18, 1.31) does not reduce a negative
        axis.
        """
        top = self.op.number(2 ** (bits - 1) - 1)
        scale = self.op("ReduceMax", self.op("Abs", x), axis, keepdims=1) / top
        return scale, self.op("Clip", self.op("Round", x / self._divisor(scale)), self.op("Neg", top), top)

    def _divisor(self, scale: Value) -> Value:
        return self.op("Where", self.op("Equal", scale, self.zero_f), self.one_f, scale)

    def _append_blocks(self, name: str, rows: Value, bits: int) -> Side:
        """Append rows of 4 or 2 bits."""
        op, past, newly = self.op, self.inputs[f"past_{name}_recent"], self.newly
        end = op.ints(END)
        recent = op("Concat", past.slice(0, self.recent_past, 2), rows.cast(Type.FLOAT16), axis=2)
        kept, behind = recent.slice(newly, end, 2), past.slice(self.recent_present, end, 2)
        self.outputs[f"present_{name}_recent"] = op("Concat", kept, behind, axis=2)
        floats = recent.cast(Type.FLOAT32)

        new = floats.slice(0, newly, 2).view(self.B, self.Hk, newly / self.block, self.block, self.d)
        top = op.number(2**bits - 1)
        zero, largest = (op(reduce, new, 3, keepdims=1) for reduce in ("ReduceMin", "ReduceMax"))
        scale_half, zero_half = (x.cast(Type.FLOAT16) for x in ((largest - zero) / top, zero))
        codes = (new - zero) / self._divisor(scale_half.cast(Type.FLOAT32))
        codes = op("Clip", op("Round", codes), self.zero_f, top)
        both = op("Concat", scale_half, zero_half, axis=3)  # [B, Hk, newly/32, 2, d]
        both = self._grow(f"{name}_scale", both, self.before_blocks, self.after_blocks)
        packed = self._grow(name, self._pack(codes, bits), self.before, self.after)
        return self._blockwise(bits, floats, packed, both)

    def _blockwise(self, bits: int, floats: Value, packed: Value, both: Value) -> Side:
        """Return a side of `after` tokens in blocks from bytes, and scales and zero points."""
        scale, zero = self.op.split(both.cast(Type.FLOAT32), 3, 2)
        codes = self._unpack(packed, bits).cast(Type.FLOAT32)
        return Side(bits, floats, codes.view(self.B, self.Hk, self.after_blocks, self.block, self.d), scale, zero)

    def _pack(self, codes: Value, bits: int) -> Value:
        """Return bytes [B, Hk, tokens, d*bits/8]. Channels that differ only in the second-last index of
        [B, Hk, tokens, d/32, 8/bits, 4*bits] share a byte."""
        places, width = 8 // bits, self.op.ints(4 * bits)
        parts = codes.view(self.B, self.Hk, self.newly, self.d_blocks, places, width)
        weights = self.op.ints(*(1 << i * bits for i in range(places))).reshape([places, 1])
        packed = self.op("ReduceSum", parts * weights.cast(Type.FLOAT32), 4, keepdims=0)
        return packed.view(self.B, self.Hk, self.newly, self.d_blocks * width).cast(Type.UINT8)

    def _unpack(self, packed: Value, bits: int) -> Value:
        """Return codes uint8 [blocks, 32]: one shift per place, in two dimensions, which takes half the time of one
        broadcasting BitShift."""
        mask, fields = self.op.ints(2**bits - 1).cast(Type.UINT8), []
        packed = packed.view(-1, 4 * bits)
        for i in range(8 // bits):
            field = packed
            if i:
                field = self.op("BitShift", packed, self.op.ints(i * bits).cast(Type.UINT8), direction="RIGHT")
            fields.append(field if (i + 1) * bits == 8 else self.op("BitwiseAnd", field, mask))  # the last needs none
        return self.op("Concat", *fields, axis=1)

    def _dequantized(self, side: Side) -> Value:
        """[B, G, w, after, d]."""
        assert side.codes and side.scale and side.zero
        return (side.codes * side.scale + side.zero).view(self.B, self.G, self.w, self.after, self.d)

    # ---- scores ----

    def _scores(self, keys: Side) -> Value:
        """[B, G, n, r, S, T], before any mask."""
        shape = (self.B, self.G, self.n, self.r, self.S)
        if keys.bits >= 8:
            return self._row_scores(keys).reshape(*shape, self.T)
        assert keys.floats
        # codes below `before`, floats from `after` on, and in between depending on the query's position
        if self.of.query_bits:
            low = self._block_scores(keys)
        else:
            low = self.queries @ self._dequantized(keys).transpose(0, 1, 2, 4, 3)
        low, high = low.view(*shape, self.after), self._products(self.queries, keys.floats).reshape(*shape, -1)
        before, newly_low = self.op.split(low, -1, [self.before, self.newly])
        newly_high, after = self.op.split(high, -1, [self.newly, self.recent_present])
        return self.op("Concat", before, self.op("Where", self.coded, newly_low, newly_high), after, axis=-1)

    def _products(self, queries: Value, keys: Value) -> Value:
        """Multiply [B, G, n, r*S, d] by [B, G, w, d, keys]; with w = 1 the branches share the key."""
        return queries @ keys.reshape(self.B, self.G, self.w, -1, self.d).transpose(0, 1, 2, 4, 3)

    def _row_scores(self, keys: Side) -> Value:
        if keys.floats:
            return self._products(self.queries, keys.floats)
        assert keys.codes and keys.scale
        key_scale = keys.scale.reshape(self.B, self.G, self.w, 1, -1)
        if not self.of.query_bits:
            return self._products(self.queries, keys.codes) * key_scale
        scale, codes = self._quantize_rows(self.queries, 4, self.of.query_bits)
        return self._products(codes, keys.codes) * scale * key_scale

    def _block_scores(self, keys: Side) -> Value:
        """Fold the scales of a block of 32 keys into the query: [B, G, n, blocks, r*S, d] x [B, G, w, blocks, d, 32].
        The zero points are multiplied with the unrounded query, [B, G, w, blocks, d] x [B, G, n, d, r*S], and the
        middle of a key's codes with the query's rounding error."""
        assert keys.codes and keys.scale and keys.zero
        blocks = (self.B, self.G, self.w, self.after_blocks)
        codes = keys.codes.view(*blocks, self.block, self.d).transpose(0, 1, 2, 3, 5, 4)
        scaled = self.queries.unsqueeze(3) * keys.scale.view(*blocks, 1, self.d)
        scale, rounded = self._quantize_rows(scaled, 5, self.of.query_bits)
        at_zero = keys.zero.view(*blocks, self.d) @ self.queries.transpose(0, 1, 2, 4, 3)
        lost = self.op("ReduceSum", scaled - rounded * scale, 5, keepdims=1)
        middle = self.op.number((2**keys.bits - 1) / 2)
        scores = rounded @ codes * scale + (at_zero.unsqueeze(-1) + lost * middle)
        return scores.transpose(0, 1, 2, 4, 3, 5)

    # ---- values ----

    def _mixed(self, weights: Value, values: Side) -> Value:
        """[B, G, w, r*S, d]."""
        if values.bits == 16:
            assert values.floats
            return self._mix(weights, values.floats, self.T)
        if values.bits == 8:
            assert values.codes and values.scale
            scale = values.scale.reshape(self.B, self.G, self.w, 1, self.T)
            weights = weights.reshape(self.B, self.G, 1, self.rS, self.T)
            return weights * scale @ values.codes.reshape(self.B, self.G, self.w, self.T, self.d)
        assert values.floats
        before, newly, after = self.op.split(weights, -1, [self.before, self.newly, self.recent_present])
        low = self.op("Concat", before, self.op("Where", self.coded, newly, self.zero_f), axis=-1)
        high = self.op("Concat", self.op("Where", self.coded, self.zero_f, newly), after, axis=-1)
        low = self._mix(low, self._dequantized(values), self.after)
        return low + self._mix(high, values.floats, self.T - self.before)

    def _mix(self, weights: Value, values: Value, tokens: Value) -> Value:
        """[B, G, r, S, tokens] x [B, G, w, tokens, d]: one product for both halves of a wide value."""
        weights = weights.view(self.B, self.G, 1, self.rS, tokens)
        return weights @ values.view(self.B, self.G, self.w, tokens, self.d)
