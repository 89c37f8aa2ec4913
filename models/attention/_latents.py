"""Attention over a cache of latents (multi-head latent attention, arXiv 2405.04434, section 2.1), in ONNX operators.

A token's latent c, of width r, gives the keys and values of all heads: k_h = [W_uk c | p], v_h = W_uv c, where p is the
token's rotated key, one for all heads. A product with W_uk moves to the query, and one with W_uv behind the mixture, so
the cache holds c and p, and all heads read them:

    s_h = scale * ((W_uk^T q_h) . c + RoPE(q'_h) . p)        m_h = sum_t softmax(s_h)_t c_t        o_h = W_uv m_h

The products with W_uk and W_uv are the caller's. With a lambda, heads are in groups of R signal heads and their noise
head, and m_i = sum_t (A_i - lambda_i A_noise)_t c_t for each signal head i.

Formats of the cache are those of ops/diff_attention.py: p is its "key", c is in the format of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ops import body, cache_body, diff_attention, hadamard, signature
from ..graph import Heads
from ..mixers import Cache, Graph, Value


class GraphNodes(body.Nodes):
    """Nodes that are written into a graph, in place of a function.

    inputs: {name: the graph's value}; settings: {name: value} of what a function would have as attributes.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Any], settings: Mapping[str, int]) -> None:
        super().__init__(list(inputs), {})
        self._graph, self._settings = graph, settings
        self._values = dict(inputs)

    def value_of(self, x: body.Value) -> Any:
        """Return the graph's value."""
        return self._values[x.name]

    def several(
        self, outputs: int, op: str, *inputs: body.Operand | None, **attributes: body.Attribute
    ) -> list[body.Value]:
        takes = [None if x is None else self._value(x).name for x in inputs]
        text = f"{op} {attributes} {takes}"
        if text not in self._written:
            if op == "Constant":
                ((kind, value),) = attributes.items()
                results = [self._graph.const(value, "float32" if "float" in kind else "int64")]
            else:
                domain, _, name = op.rpartition(".")
                values = [None if x is None else self._values[x] for x in takes]
                settings = {key: int(x) if isinstance(x, int) else x for key, x in attributes.items()}  # of an IntEnum
                results = list(self._graph.ops(name, values, outputs, domain=domain, **settings))
            self._written[text] = [self.wrapped(result) for result in results]
        return self._written[text]

    def wrapped(self, value: Any) -> body.Value:
        """Return a value of the graph as an operand; the inverse of `value_of`."""
        name = f"%{len(self._values)}"
        self._values[name] = value
        return body.Value(self, name)

    def hadamard(self, rows: body.Value, block: int) -> body.Value:
        """Add diffbit.Hadamard."""
        return self.wrapped(self._graph.custom(hadamard, [self.value_of(rows)], block=block))

    def attribute(self, name: str) -> body.Value:
        return self.scalar(self._settings[name])


class _Part(cache_body.CacheBody):
    """The rotated keys, or the latents: one row of width d per token, which all heads read."""

    op: GraphNodes

    def __init__(self, settings: diff_attention.Signature, op: GraphNodes, heads: int, width: int) -> None:
        super().__init__(settings, op)
        self.width = width
        self.Hk = op.ints(1)
        self.w = self.n = self.G = 1
        self.r = op.ints(heads)
        self._begin(op.ints(width))
        self._visible()
        if self.blockwise:
            self._lengths()

    def _transform(self, rows: body.Value) -> body.Value:
        return self.op.hadamard(rows, hadamard.block_size(self.width))

    def append(self, name: str, rows: body.Value, bits: int) -> cache_body.Side:
        """Append rows [B, S, d]."""
        return self._append(name, rows.reshape(self.B, self.S, 1, self.d).transpose(0, 2, 1, 3), bits)

    def scores(self, queries: body.Value, scale: float, side: cache_body.Side) -> body.Value:
        """Return the logits [B, 1, 1, H, S, T] of queries [B, H, S, d]."""
        self.queries = queries.reshape(self.B, 1, 1, self.rS, self.d) * scale
        return self._scores(side)

    def mixed(self, weights: body.Value, heads: int, side: cache_body.Side) -> body.Value:
        """Return the mixtures [B, H, S, d] of weights [B, H, S, T]."""
        self.r = self.op.ints(heads)
        self.rS = self.r * self.S
        return self._mixed(weights.unsqueeze(1), side).reshape(self.B, self.r, self.S, self.d)

    def rotated(self, name: str, heads: int) -> body.Value:
        return self._rotate(name, heads)


def latent_attention(
    g: Graph, inputs: Mapping[str, Value], past: Cache, heads: Heads, softmaxes: int, latent_width: int, scale: float
) -> tuple[Value, Cache]:
    """Add the nodes; returns the mixtures [B, signal heads, S, r] in the query's type, and the presents.

    inputs: query [B, S, H * d'], not yet rotated, latent_query [B, H, S, r], key [B, S, d'], latent [B, S, r], and
    lambda float [B, S, signal heads] if there are noise heads. heads: head_dim is d', num_heads counts signal heads.
    softmaxes: H.
    """
    settings, lengths, shared = g.attention_inputs(past, heads, 1 + ("lambda" in inputs))
    op = GraphNodes(g, {**inputs, **shared}, lengths)
    key, latent = (_Part(settings, op, softmaxes, width) for width in (heads.head_dim, latent_width))
    nodes, count, ratio = key.inputs, heads.num_heads, heads.noise_ratio
    keys = key.append("key", key.rotated("key", 1), settings.key_bits)
    latents = latent.append("latent", nodes["latent"], settings.value_bits)
    scores = key.scores(key.rotated("query", softmaxes).transpose(0, 2, 1, 3), scale, keys)
    scores = scores + latent.scores(nodes["latent_query"].cast(signature.Type.FLOAT32), scale, latents)
    visible = key.visible.squeeze(1)  # [B, 1, S, T]
    weights = op("Softmax", op("Where", visible, scores.squeeze(1, 2), -1e30), axis=-1)  # [B, H, S, T]
    if settings.branches == 2:
        weights = weights.view(key.B, count // ratio, ratio + 1, key.S, key.T)
        signal, noise = op.split(weights, 2, [ratio, 1])
        by = nodes["lambda"].transpose(0, 2, 1).view(key.B, count // ratio, ratio, key.S, 1)
        weights = (signal - noise * by).view(key.B, count, key.S, key.T)
    mixed = latent.mixed(op("Where", visible, weights, key.zero_f), count, latents)
    presents = key.outputs | latent.outputs
    return op.value_of(mixed.like(nodes["query"])), {name: op.value_of(presents[f"present_{name}"]) for name in past}
