"""The body of DiffAttention in ONNX operators; ops/diff_attention.py specifies the op.

cache_body.py has the cache, and explains the shapes in comments.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .body import Nodes, Value
from .cache_body import CacheBody
from .diff_attention import INPUTS, OP, Signature
from .signature import Type

if TYPE_CHECKING:
    import onnx_ir


def grouped_body(op: Nodes) -> list[Value]:
    """Softmax attention over a float cache by ONNX Runtime's own operators.

    RoPE is a separate node: the one built into GroupQueryAttention reads only the first position of a prompt and counts
    on from there, so rows padded on the left would be cached at other positions than later steps expect. Every row has
    T tokens, padding included; a bias hides padding, and is finite, so that a query that sees nothing gives no NaN.
    ONNX Runtime computes values that do not depend on the layer once for all layers.
    """
    query, key, value, _, past_key, past_value, _, position_ids, cos, sin, attention_mask, *rest = op.inputs
    batch, length, total = position_ids.size(0), position_ids.size(1), attention_mask.size(1)
    count = total.cast(Type.INT32)
    lengths = (count - op.ints(1).cast(Type.INT32)).expand(batch)
    row = op("Where", attention_mask.cast(Type.BOOL), 0.0, -65504.0).like(query)
    bias = row.unsqueeze(1, 2).expand(batch, 1, length, total)
    tables = position_ids, cos.like(query), sin.like(query)
    query, key = (op("com.microsoft.RotaryEmbedding", x, *tables) for x in (query, key))
    inputs = query, key, value, past_key, past_value, lengths, op("Squeeze", count), None, None, None, bias
    attributes = {
        "num_heads": op.reference("num_heads"),
        "kv_num_heads": op.reference("num_kv_heads"),
        "scale": op.reference("scale"),
    }
    out, *presents = op.several(3, "com.microsoft.GroupQueryAttention", *inputs, **attributes)
    return [gated(op, out, rest[-1], op.dim("num_heads")) if rest else out, *presents]


def gated(op: Nodes, out: Value, gates: Value, heads: Value) -> Value:
    """Multiply heads [B, S, H * d] by gates [B, S, H]. Every head has been computed: only kernels skip."""
    by_head = out.cast(Type.FLOAT32).reshape(0, 0, heads, -1) * gates.unsqueeze(3)
    return by_head.reshape(0, 0, -1).like(out)


def function(of: Signature = Signature(), grouped: bool = False, name: str | None = None) -> onnx_ir.Function:  # noqa: B008 (frozen)
    """Return the op's body as an ONNX model-local function, which runs if no native library is registered.

    A model's nodes of one `name` share it and have the same signature. It declares as many inputs and outputs as they
    have; ONNX Runtime inlines it only if it computes all of them, including omitted ones. grouped: a body of ONNX
    Runtime's own operators, which write into a buffer shared by past and present; for a float cache, one branch and
    heads whose width is a multiple of 8.
    """
    write = grouped_body if grouped else partial(body, of)
    return OP.function(write, INPUTS[: len(of.inputs)], of.declared_outputs, name)


def body(of: Signature, op: Nodes) -> list[Value]:
    """Write the nodes of the function for a signature; returns its declared outputs."""
    attention = AttentionBody(of, op)
    return [attention.outputs[name] for name in of.declared_outputs]


class AttentionBody(CacheBody):
    def __init__(self, of: Signature, op: Nodes) -> None:
        super().__init__(of, op)
        for dim in (1, -1):  # many nodes share them; an artifact has them first
            op.ints(dim)
        self.H, self.Hk, self.w = op.dim("num_heads"), op.dim("num_kv_heads"), op.dim("wide_value") + 1
        self.n = op.ints(of.branches)
        self.G = self.Hk / self.w
        self.r = self.H / self.G
        self._begin()

        queries = self._in_pairs(self._rotate("query", -1))
        queries = queries.reshape(self.B, self.S, self.G, self.r, self.n, -1).transpose(0, 2, 4, 3, 1, 5)
        queries = queries.reshape(self.B, self.G, self.n, self.rS, -1)
        self.queries = queries * op.attribute("scale")  # [B, G, n, r*S, d]
        self._visible()
        if self.blockwise:
            self._lengths()
        if of.appends:
            value = self.inputs["value"].reshape(self.B, self.S, self.Hk, -1)
            rows = {"key": self._rotate("key", self.Hk), "value": value}
            rows = {name: x.transpose(0, 2, 1, 3) for name, x in rows.items()}  # [B, Hk, S, d]
            keys = self._append("key", rows["key"], of.key_bits)
            values = self._append("value", rows["value"], of.value_bits)
        else:
            keys, values = self._read("key", of.key_bits), self._read("value", of.value_bits)
        self.outputs |= {name: op.unused() for name in of.declared_outputs if name not in of.outputs}
        self.outputs["out"] = self._finish(self._mixed(self._weights(self._scores(keys)), values))

    def _in_pairs(self, query: Value) -> Value:
        """Repeat every noise head for each of its signal heads: [B, S, H/R, R, n, d]."""
        if (ratio := self.of.noise_ratio) == 1:
            return query
        groups = query.reshape(self.B, self.S, -1, ratio + 1, self.d)
        signal, noise = self.op.split(groups, 3, [ratio, 1])
        noise = noise.expand([1, 1, 1, ratio, 1])
        return self.op("Concat", signal.unsqueeze(4), noise.unsqueeze(4), axis=4)

    def _weights(self, scores: Value) -> Value:
        """Return A1 - lambda A2 [B, G, r, S, T]; 0 for a row that sees nothing."""
        scores = self.op("Where", self.visible.unsqueeze(1), scores, -1e30)
        shares = self.op("Softmax", scores, axis=-1)
        if self.of.branches == 1:
            return self.op("Where", self.visible, shares.squeeze(2), self.zero_f)
        signal, noise = (branch.squeeze(2) for branch in self.op.split(shares, 2, 2))
        by = self.inputs["lambda"].cast(Type.FLOAT32).expand([1, 1, 1]).reshape(0, 0, self.G, self.r)
        by = by.transpose(0, 2, 3, 1).unsqueeze(-1)
        return self.op("Where", self.visible, signal - noise * by, self.zero_f)

    def _finish(self, mixed: Value) -> Value:
        """Put the heads in order and apply the norm over the w*d numbers of a head."""
        mixed = mixed.reshape(self.B, self.G, self.w, self.r, self.S, -1).transpose(0, 4, 1, 3, 2, 5)
        heads = mixed.reshape(self.B, self.S, self.H, -1)
        eps = self.op.attribute("norm_eps")
        normed = heads / self.op("Sqrt", self.op("ReduceMean", heads * heads, -1, keepdims=1) + eps)
        out = self.op("Where", self.op("Greater", eps, self.zero_f), normed, heads)
        if self.of.gates:
            out = out * self.inputs["gates"].unsqueeze(3)
        return out.reshape(self.B, self.S, -1).like(self.inputs["query"])
