"""The part of an attention's body that appends to a cache and reads it, in ONNX operators. ops/diff_attention.py says
what a cache holds; diff_attention_body.py is that operator's body. Other mixers can write theirs with it, too.

Shapes are in comments: n = branches, w = 1 + wide_value, G = kv heads that hold a value, r = H/G heads that share one.
In a cache below 8 bits, `before` tokens are codes before the call and `after` tokens after it; those in between are
available as codes and as floats. Of the `before` tokens, the first `firsts` are available as floats, too.

With a sliding window, the `base` tokens before the first one that the call's first token sees are dropped, and
past_length, T, `before` and `after` count from there. Below 8 bits, `base` is a multiple of 32.

There is one mask for all heads, and the cost of a decode step is linear in the context. It uses only widely supported
operators, for browsers too: no float16 arithmetic, and float32 products of levels, exact up to 2^24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .body import END, Nodes, Operand, Value
from .hadamard import transform
from .kv_cache import BLOCK, LEVELS, OFFSET_TOKENS, PLANES, THRESHOLDS
from .signature import Type

if TYPE_CHECKING:
    from .diff_attention import Signature


class Side(NamedTuple):
    """Keys or values of a call; fields that the cache's format does not have are None."""

    bits: int
    floats: Value | None = None  # [B, Hk, T, d]; below 8 bits [B, Hk, firsts + T - before, d], rotated
    levels: Value | None = None  # float32 [B, Hk, n, d] with n = T; below 8 bits n = after
    scale: Value | None = None  # float32 [B, Hk, n]
    offset: Value | None = None  # float32 [B, Hk, 1, d]


class CacheBody:
    """The nodes of one attention for a signature. A subclass sets the sizes below (int64 [1]), then calls `_begin`,
    `_visible`, `_lengths` if it is `blockwise`, `_append` or `_read`, `_scores`, `_mixed`."""

    Hk: Value  # heads of the cache
    w: Value | int
    n: Value | int
    G: Value | int
    r: Value
    queries: Value  # [B, G, n, r*S, d], after RoPE and scaled

    def __init__(self, of: Signature, op: Nodes) -> None:
        self.of, self.op = of, op
        self.inputs = {value.name: value for value in op.inputs}
        self.outputs: dict[str, Value] = {}

    def _begin(self, width: Value | None = None) -> None:
        """Compute the lengths of the call. width: of the cache's rows; None: RoPE's."""
        query, self.past_length = self.inputs["query"], self.inputs["past_length"]
        self.B, self.S = query.size(0), query.size(1)
        self.block, self.blockwise = self.op.ints(BLOCK), min(self.of.key_bits, self.of.value_bits) < 8
        self.base = self._base()
        if self.of.sliding_window:
            self.past_length = self.past_length - self.base
        self.T = self.past_length + self.S
        self.rS = self.r * self.S
        self.d = self.inputs["cos"].size(1) * 2 if width is None else width
        self.zero_f, self.one_f = self.op.number(0), self.op.number(1)

    def _transform(self, rows: Value) -> Value:
        """Apply the Hadamard transform of a cache's rows to float32 [..., d]."""
        return transform(self.op, rows, self.op("BitwiseAnd", self.d, self.op("Neg", self.d)))

    def _rotate(self, name: str, heads: Operand) -> Value:
        """Apply RoPE to query or key [B, S, heads, d]."""
        rows = self.inputs["position_ids"]
        tables = (self.op("Gather", self.inputs[table], rows, axis=0) for table in ("cos", "sin"))
        cos, sin = (table.unsqueeze(2) for table in tables)
        x = self.inputs[name].cast(Type.FLOAT32).reshape(self.B, self.S, heads, self.d)
        low, high = self.op.split(x, -1, 2)
        return self.op("Concat", low * cos - high * sin, high * cos + low * sin, axis=-1)

    def _base(self) -> Value:
        """Return the number of tokens that no query sees and, below 8 bits, that are already quantized."""
        none = self.op.ints(0)
        if not self.of.sliding_window:
            return none
        base = self.op("Max", self.past_length - (self.of.sliding_window - 1), none)
        if not self.blockwise:
            return base
        return self.op("Min", base / self.block * self.block, self._quantized_tokens(self.past_length))

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
        """Compute the lengths that keys and values below 8 bits share."""
        before = self.past_length if self.of.appends else self.T
        self.before, self.after = self._quantized_tokens(before), self._quantized_tokens(self.T)
        self.newly = self.after - self.before
        self.recent_past, self.recent_present = before - self.before, self.T - self.after
        self.first = self.op.dim("first")
        self.firsts = self.op("Min", self.first, self.before)
        # [S, after - before]: whether the call's token reads the other token's code
        token, end = self.key_index.slice(self.before, self.after, 0), self._quantized_tokens(self.query_index + 1)
        self.coded = self.op("And", self.op("GreaterOrEqual", token, self.first), self.op("Less", token, end))

    def _quantized_tokens(self, count: Value) -> Value:
        """Return how many of `count` tokens are codes."""
        return self.op("Max", count - self.op.dim("window"), 0) / self.block * self.block

    # ---- the cache ----

    def _append(self, name: str, rows: Value, bits: int) -> Side:
        if bits < 8:
            return self._append_rotated(name, rows, bits)
        if bits == 16:
            new = rows.like(self.inputs[f"past_{name}"])
            return Side(bits, self._grow(name, new).cast(Type.FLOAT32))
        x = self._transform(rows.cast(Type.FLOAT32))
        scale = self._scale(x, 3, bits).cast(Type.FLOAT16)
        codes = self._grow(name, self._codes(x, scale.cast(Type.FLOAT32), bits).cast(Type.INT8)).cast(Type.FLOAT32)
        return Side(bits, None, codes, self._grow(f"{name}_scale", scale.squeeze(3)).cast(Type.FLOAT32))

    def _read(self, name: str, bits: int) -> Side:
        """Read the presents of another node."""
        tokens = self.T if bits >= 8 else self.after
        buffer = self.inputs[f"past_{name}"].slice(0, tokens, 2)
        if bits == 16:
            return Side(bits, buffer.cast(Type.FLOAT32))
        scale = self.inputs[f"past_{name}_scale"].slice(0, tokens, 2).cast(Type.FLOAT32)
        if bits == 8:
            return Side(bits, None, buffer.cast(Type.FLOAT32), scale)
        firsts, offset, residual = self._recent(name)
        floats = self.op("Concat", firsts.slice(0, self.firsts, 2), residual.slice(0, self.recent_present, 2), axis=2)
        shift = offset.cast(Type.FLOAT32) if name == "key" else None
        return Side(bits, floats.cast(Type.FLOAT32), self._levels(self._unpack(buffer, bits), bits), scale, shift)

    def _recent(self, name: str) -> tuple[Value, Value, Value]:
        """Return the first tokens, the offset, and the residual window of the past; only keys have an offset."""
        past, offset = self.inputs[f"past_{name}_recent"], self.first + int(name == "key")
        return past.slice(0, self.first, 2), past.slice(self.first, offset, 2), past.slice(offset, END, 2)

    def _grow(self, name: str, new: Value, old_length: Value | None = None, length: Value | None = None) -> Value:
        """Return a buffer's first `length` tokens, past and `new`, and make the present, which keeps those behind."""
        past, end = self.inputs[f"past_{name}"], self.op.ints(END)
        old_length, length = old_length or self.past_length, length or self.T
        if self.of.sliding_window:
            return self._turn(name, new, self.base, self.base + old_length, self.base + length)
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
        """Quantize rows x [..., d] of float32 -> scales [..., 1] and codes [..., d], integers in float32."""
        scale = self._scale(x, axis, bits)
        return scale, self._codes(x, scale, bits)

    def _scale(self, x: Value, axis: int, bits: int) -> Value:
        """Return the scales [..., 1] of rows x [..., d].

        `axis` is the last one, as a positive number: without rows, ONNX Runtime (1.18, 1.31) does not reduce a negative
        axis.
        """
        return self.op("ReduceMax", self.op("Abs", x), axis, keepdims=1) / self.op.number(2 ** (bits - 1) - 1)

    def _codes(self, x: Value, scale: Value, bits: int) -> Value:
        top = self.op.number(2 ** (bits - 1) - 1)
        return self.op("Clip", self.op("Round", x / self._divisor(scale)), self.op("Neg", top), top)

    def _divisor(self, scale: Value) -> Value:
        return self.op("Where", self.op("Equal", scale, self.zero_f), self.one_f, scale)

    def _append_rotated(self, name: str, rows: Value, bits: int) -> Side:
        """Append rows below 8 bits."""
        op, newly, end = self.op, self.newly, self.op.ints(END)
        firsts, offset, residual = self._recent(name)
        new = self._transform(rows.cast(Type.FLOAT32)).cast(Type.FLOAT16)
        recent = op("Concat", residual.slice(0, self.recent_past, 2), new, axis=2)  # from `before` on
        leaving = recent.slice(0, newly, 2).cast(Type.FLOAT32)
        if name == "key":
            offset = self._offset(leaving, offset)
            leaving = leaving - offset.cast(Type.FLOAT32)
        known = op("Min", self.first, self.past_length)
        present = (
            *(firsts.slice(0, known, 2), new.slice(0, self.first - known, 2), firsts.slice(self.T, end, 2)),
            *([offset] if name == "key" else []),
            *(recent.slice(newly, end, 2), residual.slice(self.recent_present, end, 2)),
        )
        self.outputs[f"present_{name}_recent"] = op("Concat", *present, axis=2)
        codes, scale = self._encode_rows(leaving, bits)
        packed = self._grow(name, self._pack(codes, bits), self.before, self.after)
        scale = self._grow(f"{name}_scale", scale, self.before, self.after).cast(Type.FLOAT32)
        floats = op("Concat", firsts.slice(0, self.firsts, 2), recent, axis=2).cast(Type.FLOAT32)
        shift = offset.cast(Type.FLOAT32) if name == "key" else None
        return Side(bits, floats, self._levels(self._unpack(packed, bits), bits), scale, shift)

    def _offset(self, leaving: Value, past: Value) -> Value:
        """Return the offset of the keys: the past's, or that of the first block if it leaves the window in this call.

        `computed` is 1 if it does, else 0: then the means have no row.
        """
        op, tokens = self.op, OFFSET_TOKENS
        before, after = (op("Min", count + self.base, 1) for count in (self.before, self.after))
        computed = after - before
        rows = leaving.slice(tokens.start, computed * (tokens.stop - tokens.start) + tokens.start, 2)
        halves = rows.view(self.B, self.Hk, computed, 2, 2, 2, 2, self.d)
        for _ in range(4):  # halves added to halves
            halves = op("ReduceSum", halves, 3, keepdims=0)
        mean = (halves * (1 / len(tokens))).cast(Type.FLOAT16)
        return op("Concat", mean, past, axis=2).slice(0, 1, 2)

    def _encode_rows(self, x: Value, bits: int) -> tuple[Value, Value]:
        """Quantize rows [B, Hk, tokens, d] of float32 -> codes, integers in float32, and scales float16
        [B, Hk, tokens]."""
        op = self.op
        unit, numbers = self._quantize_rows(x, 3, 8)
        energy = op("Max", op("ReduceSum", numbers * numbers, 3, keepdims=1), self.one_f)
        z = numbers * op("Sqrt", self.d.cast(Type.FLOAT32) / energy)
        thresholds = op.numbers(*THRESHOLDS[bits]).reshape([-1, 1, 1, 1, 1])  # in front, so that long runs are added
        codes = op("ReduceSum", op("Greater", z, thresholds).cast(Type.FLOAT32), 0, keepdims=0)
        levels = self._levels(codes, bits)
        dot, norm = (op("ReduceSum", product, 3, keepdims=0) for product in (numbers * levels, levels * levels))
        return codes, (unit.squeeze(3) * (dot / norm)).cast(Type.FLOAT16)

    def _levels(self, codes: Value, bits: int) -> Value:
        """Return the levels [B, Hk, tokens, d] of codes. GatherElements takes a quarter of Gather's time."""
        codes = codes.cast(Type.INT32).reshape(-1)
        levels = self.op("GatherElements", self.op.numbers(*LEVELS[bits]), codes, axis=0)
        return levels.reshape(self.B, self.Hk, -1, self.d)

    def _pack(self, codes: Value, bits: int) -> Value:
        """Return bytes [B, Hk, tokens, d*bits/8]. In a plane, channels that differ only in the second-last index of
        [groups, 8/width, 4*width] share a byte."""
        op = self.op
        planes: list[Value] = []
        for width in PLANES[bits]:
            plane = codes
            if len(planes) + 1 < len(PLANES[bits]):
                codes = op("Floor", codes * 2.0**-width)
                plane = plane - codes * 2.0**width
            weights = op.numbers(*(1 << i for i in range(0, 8, width))).reshape([8 // width, 1])
            parts = plane.view(-1, 8 // width, 4 * width)
            planes.append(op("ReduceSum", parts * weights, 1, keepdims=0))
        packed = op("Concat", *planes, axis=1) if len(planes) > 1 else planes[0]
        return packed.view(self.B, self.Hk, self.newly, self.d / self.block * (4 * bits)).cast(Type.UINT8)

    def _unpack(self, packed: Value, bits: int) -> Value:
        """Return codes uint8 [groups, 32]: one shift per place, in two dimensions, which takes half the time of one
        broadcasting BitShift."""
        op, widths = self.op, PLANES[bits]
        packed = packed.reshape(-1, 4 * bits)
        planes = op.split(packed, 1, [4 * width for width in widths]) if len(widths) > 1 else [packed]
        codes, low = [], 0  # low: the place of the plane's lowest bit in a code
        for width, plane in zip(widths, planes, strict=True):
            mask, fields = self._byte(((1 << width) - 1) << low), []
            for place in range(0, 8, width):
                field = plane
                if place != low:
                    direction = "RIGHT" if place > low else "LEFT"
                    field = op("BitShift", plane, self._byte(abs(place - low)), direction=direction)
                alone = low == 0 and place + width == 8
                fields.append(field if alone else op("BitwiseAnd", field, mask))
            codes.append(op("Concat", *fields, axis=1))
            low += width
        return op("BitwiseOr", *codes) if len(codes) > 1 else codes[0]

    def _byte(self, value: int) -> Value:
        """uint8 [1]."""
        return self.op.ints(value).cast(Type.UINT8)

    # ---- scores ----

    def _scores(self, keys: Side) -> Value:
        """[B, G, n, r, S, T], before any mask."""
        shape = (self.B, self.G, self.n, self.r, self.S)
        if keys.bits == 16:
            assert keys.floats
            return self._products(self.queries, keys.floats).reshape(*shape, self.T)
        queries = self._transform(self.queries)
        if keys.bits == 8:
            return self._level_scores(queries, keys).reshape(*shape, self.T)
        assert keys.floats
        # floats of the first tokens, codes below `before`, floats from `after` on, and in between depending on the
        # query's position
        low = self._level_scores(queries, keys).view(*shape, self.after)
        high = self._products(queries, keys.floats).reshape(*shape, -1)
        _, before, newly_low = self.op.split(low, -1, [self.firsts, self.before - self.firsts, self.newly])
        firsts, newly_high, after = self.op.split(high, -1, [self.firsts, self.newly, self.recent_present])
        newly = self.op("Where", self.coded, newly_low, newly_high)
        return self.op("Concat", firsts, before, newly, after, axis=-1)

    def _products(self, queries: Value, keys: Value) -> Value:
        """Multiply [B, G, n, r*S, d] by [B, Hk, keys, d]; with w = 1 the branches share the key."""
        return queries @ keys.reshape(self.B, self.G, self.w, -1, self.d).transpose(0, 1, 2, 4, 3)

    def _level_scores(self, queries: Value, keys: Side) -> Value:
        assert keys.levels and keys.scale
        key_scale = keys.scale.reshape(self.B, self.G, self.w, 1, -1)
        if self.of.query_bits:
            scale, codes = self._quantize_rows(queries, 4, self.of.query_bits)
            scores = self._products(codes, keys.levels) * scale * key_scale
        else:
            scores = self._products(queries, keys.levels) * key_scale
        return scores + self._products(queries, keys.offset) if keys.offset else scores

    # ---- values ----

    def _mixed(self, weights: Value, values: Side) -> Value:
        """[B, G, w, r*S, d]."""
        if values.bits == 16:
            assert values.floats
            return self._mix(weights, values.floats)
        if values.bits == 8:
            return self._transform(self._mix_levels(weights, values))
        assert values.floats
        parts = [self.firsts, self.before - self.firsts, self.newly, self.recent_present]
        firsts, before, newly, after = self.op.split(weights, -1, parts)
        newly_low, newly_high = (
            self.op("Where", self.coded, *pair) for pair in ((newly, self.zero_f), (self.zero_f, newly))
        )
        low = self.op("Concat", firsts * self.zero_f, before, newly_low, axis=-1)
        high = self.op("Concat", firsts, newly_high, after, axis=-1)
        return self._transform(self._mix_levels(low, values) + self._mix(high, values.floats))

    def _mix_levels(self, weights: Value, values: Side) -> Value:
        assert values.levels and values.scale
        scale = values.scale.reshape(self.B, self.G, self.w, 1, -1)
        return self._flat(weights) * scale @ values.levels.reshape(self.B, self.G, self.w, -1, self.d)

    def _mix(self, weights: Value, values: Value) -> Value:
        """[B, G, r, S, tokens] x [B, Hk, tokens, d]: one product for both halves of a wide value."""
        return self._flat(weights) @ values.reshape(self.B, self.G, self.w, -1, self.d)

    def _flat(self, weights: Value) -> Value:
        """[B, G, 1, r*S, tokens]."""
        return weights.view(self.B, self.G, 1, self.rS, weights.size(4))
