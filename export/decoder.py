"""The decoder's graph, one layer at a time: embedding, blocks of attention and gated MLP, final norm, head.

Inputs and outputs carry the names that onnxruntime-genai and optimum look for:

    input_ids int64 [B, S], attention_mask int64 [B, T], position_ids int64 [B, S],
    past_key_values.N.key|value [B, Hk, C, d]   ->   logits fp32 [B, S, V], present.N.key|value [B, Hk, max(C, T), d]

T = past + S: the past's length follows from the mask's, so no loader needs to pass it. A low-bit cache has more buffers
than key and value, and other shapes (quantize/cache.py). What all layers share (lengths, RoPE tables, the mask as a
bias) is computed once, by `Step`; a variant adds its nodes through its own method `onnx` (models/attention/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ..models import Block, ModelConfig, rope_tables
from ..models.norm import RMSNorm
from ..ops import diff_attention
from ..ops.cache import Buffer, CacheSpec, tokens_each
from ..ops.kv_cache import BLOCK
from ..quantize import AttentionScheme
from ..quantize.cache import is_low_bit, operator
from .graph import MICROSOFT, Graph

# Added to the logits of hidden keys: finite, so that a query that sees nothing (padding) gives numbers and not NaN
HIDDEN: dict[type, float] = {np.float32: -1e30, np.float16: -65504.0}

HALVES: dict[torch.dtype, Any] = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}

# A layer's cache by the names of its buffers
Cache = dict[str, ir.Value]

T = TypeVar("T")


def shared(make: Callable[[Step], T]) -> cached_property[T]:
    """A value that `Step` makes on first use, named as standing outside the layers."""

    def made(step: Step) -> T:
        with step.graph.top():
            return make(step)

    made.__doc__ = make.__doc__
    return cached_property(made)


class Step:
    """What all layers of one call share. Values are made on first use, so a graph holds only what its variant needs."""

    def __init__(self, g: Graph, config: ModelConfig, context_length: int, attention: AttentionScheme) -> None:
        self.graph = self._g = g
        self.attention = attention
        self._tables = [table.numpy() for table in rope_tables(config, context_length)]
        self.input_ids = g.input("input_ids", np.int64, ["batch", "sequence"])
        self.attention_mask = g.input("attention_mask", np.int64, ["batch", "total_sequence"])
        self.position_ids = g.input("position_ids", np.int64, ["batch", "sequence"])

    @property
    def low_bit(self) -> bool:
        """Is diffbit's own operator wanted, whatever the attention variant?"""
        return is_low_bit(self.attention)

    @shared
    def _batch(self) -> ir.Value:
        return self._g.op("Shape", [self.input_ids], end=1)  # int64 [1]: B

    @shared
    def _length(self) -> ir.Value:
        return self._g.op("Shape", [self.input_ids], start=1)  # int64 [1]: S

    @shared
    def _total(self) -> ir.Value:
        return self._g.op("Shape", [self.attention_mask], start=1)  # int64 [1]: T

    @shared
    def past_length(self) -> ir.Value:
        """int64 [1]: T - S."""
        return self._g.op("Sub", [self._total, self._length])

    @shared
    def cos(self) -> ir.Value:
        """fp32 [context_length, d/2]."""
        return self._g.initializer("cos", self._tables[0])

    @shared
    def sin(self) -> ir.Value:
        return self._g.initializer("sin", self._tables[1])

    @shared
    def _rotary(self) -> list[ir.Value]:
        """Both tables in the graph's dtype, which RotaryEmbedding wants."""
        return [self._g.weight(name, table) for name, table in zip(("cos", "sin"), self._tables, strict=True)]

    @shared
    def _lengths(self) -> tuple[ir.Value, ir.Value]:
        """GroupQueryAttention's seqlens_k int32 [B] and total_sequence_length int32 [].

        Every row counts T tokens, padding included: what is hidden is left to the bias, which works on either side.
        """
        g = self._g
        total = g.op("Squeeze", [g.cast(self._total, np.int32)])
        last = g.op("Sub", [total, g.const(1, np.int32)])
        return g.op("Expand", [last, self._batch]), total

    @shared
    def _bias(self) -> ir.Value:
        """[B, 1, S, T]: HIDDEN where the mask hides a key, else 0. Causality is the operator's own."""
        g = self._g
        real = g.cast(self.attention_mask, np.bool_)
        row = g.op("Where", [real, g.const(0, g.dtype), g.const(HIDDEN[g.dtype], g.dtype)])  # [B, T]
        shape = g.op("Concat", [self._batch, g.const([1]), self._length, self._total], axis=0)
        return g.op("Expand", [g.op("Unsqueeze", [row, g.const([1, 2])]), shape])

    def softmax_attention(
        self,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        past: Cache,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
    ) -> tuple[ir.Value, Cache]:
        """Query [B, S, num_heads*d], key and value [B, S, num_kv_heads*d] -> attention, the cache with them.

        A GroupQueryAttention, or for low-bit attention a DiffAttention of one branch. Beside the former, RoPE has a
        node of its own: the operator's built-in one reads only the first position of a prompt and counts on from there,
        so rows padded on the left would enter the cache at positions other than those of later steps.
        """
        if self.low_bit:
            return self.diff_attention(
                query, key, value, None, past, num_heads=num_heads, num_kv_heads=num_kv_heads, scale=scale, branches=1
            )
        g = self._g
        rotated = [
            g.op("RotaryEmbedding", [x, self.position_ids, *self._rotary], domain=MICROSOFT) for x in (query, key)
        ]
        inputs = [*rotated, value, past["key"], past["value"], *self._lengths, None, None, None, self._bias]
        out, present_key, present_value = g.op(
            "GroupQueryAttention",
            inputs,
            domain=MICROSOFT,
            outputs=3,
            num_heads=num_heads,
            kv_num_heads=num_kv_heads,
            scale=scale,
        )
        return out, {"key": present_key, "value": present_value}

    def diff_attention(
        self,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        lambda_: ir.Value | None,
        past: Cache,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        branches: int = 2,
        wide_value: int = 0,
        norm_eps: float = 0.0,
    ) -> tuple[ir.Value, Cache]:
        """diffbit.DiffAttention with the scheme's numbers: ops/diff_attention.py says what its inputs are."""
        signature = operator(self.attention, branches)
        values = {"query": query, "key": key, "value": value, "lambda": lambda_}
        values |= {
            name: getattr(self, name) for name in ("past_length", "position_ids", "cos", "sin", "attention_mask")
        }
        values |= {f"past_{name}": buffer for name, buffer in past.items()}
        made = self._g.custom(
            diff_attention,
            [values.get(name) for name in signature.inputs],
            outputs=len(signature.outputs),
            signature=signature,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            wide_value=wide_value,
            scale=scale,
            norm_eps=norm_eps,
            window=self.attention.window if self.attention.has_window else 0,
            **asdict(signature),
        )
        found = {}
        for name, value in zip(signature.outputs, made, strict=True):
            if name:
                found[name] = value
            else:
                value.name = ""  # as ONNX has it for an output that is left out
        return found["out"], {name: found[f"present_{name}"] for name in past}


class DecoderGraph:
    """Built from the bottom up: `embed`, `block` for each layer, `head`. Weights are written as they come."""

    def __init__(
        self, g: Graph, config: ModelConfig, context_length: int, attention: AttentionScheme, cache: CacheSpec
    ) -> None:
        self.g, self.config, self.cache = g, config, cache
        self.step = Step(g, config, context_length, attention)
        self._past = [
            {
                buffer.name: g.input(f"past_key_values.{i}.{buffer.name}", buffer.dtype, _named(buffer, "past"))
                for buffer in layer
            }
            for i, layer in enumerate(cache.layers)
        ]
        self._present: list[Cache] = []
        self._x: ir.Value
        self._table: ir.Value

    def embed(self, table: Tensor) -> None:
        """The embedding, float [V, E]. A float32 graph keeps a 16-bit table: half the bytes, the same numbers."""
        g, name = self.g, "embed_tokens.weight"
        if table.dtype in HALVES and g.dtype is np.float32 and not self.config.tie_embeddings:
            stored = g.initializer(name, table.view(torch.int16).numpy().view(HALVES[table.dtype]))
            self._x = g.cast(g.op("Gather", [stored, self.step.input_ids]), np.float32)
            return
        self._table = g.weight(name, table.float().numpy())  # a tied head multiplies by it, too
        self._x = g.op("Gather", [self._table, self.step.input_ids])

    def block(self, block: Block, index: int) -> None:
        """Decoder layer `index`; its linears are float or QuantLinear."""
        g, x = self.g, self._x
        with g.scope(f"layers.{index}"):
            normed = g.norm(x, block.input_layernorm, "input_layernorm")
            with g.scope("self_attn"):
                attention: Any = block.self_attn
                out, present = attention.onnx(g, self.step, normed, self._past[index])
            x = g.op("Add", [x, out])
            normed = g.norm(x, block.post_attention_layernorm, "post_attention_layernorm")
            with g.scope("mlp"):
                gate = g.linear(normed, block.mlp.gate_proj, "gate_proj")
                up = g.linear(normed, block.mlp.up_proj, "up_proj")
                down = g.linear(self._gated(gate, up, block), block.mlp.down_proj, "down_proj")
            self._x = g.op("Add", [x, down])
        self._present.append(present)

    def head(self, norm: RMSNorm, head: nn.Module | None) -> None:
        """The final norm and the head; None ties it to the embedding. Declares the graph's outputs."""
        g, config = self.g, self.config
        x = g.norm(self._x, norm, "norm")
        if head is None:
            logits = g.op("MatMul", [x, g.op("Transpose", [self._table], perm=[1, 0])])  # folded at load
        else:
            logits = g.linear(x, head, "lm_head")
        if g.dtype is not np.float32:
            logits = g.cast(logits, np.float32)
        g.output("logits", logits, np.float32, ["batch", "sequence", config.vocab_size])
        for index, present in enumerate(self._present):
            for buffer in self.cache.layers[index]:
                name = f"present.{index}.{buffer.name}"
                g.output(name, present[buffer.name], buffer.dtype, _named(buffer, "present"))

    def _gated(self, gate: ir.Value, up: ir.Value, block: Block) -> ir.Value:
        """What down_proj reads: act(gate) * up, through a norm where the model has one.

        relu(gate)^2 * up grows with the third power: where both are 41, a few times what a small model's are, it passes
        float16's largest number, so that a float16 graph computes it, and the norm that makes it small again, in
        float32.
        """
        g, norm = self.g, block.mlp.ffn_sub_norm
        if self.config.mlp == "swiglu":
            return g.norm(g.op("Mul", [g.op("Mul", [gate, g.op("Sigmoid", [gate])]), up]), norm, "ffn_sub_norm")
        if g.dtype is not np.float32:
            gate, up = g.cast(gate, np.float32), g.cast(up, np.float32)
        positive = g.op("Relu", [gate])
        hidden = g.norm(g.op("Mul", [g.op("Mul", [positive, positive]), up]), norm, "ffn_sub_norm", np.float32)
        return hidden if g.dtype is np.float32 else g.cast(hidden, g.dtype)


def _named(buffer: Buffer, when: str) -> list[int | str]:
    """Its shape with names for what varies."""
    names = {1: f"{when}_sequence", BLOCK: f"{when}_groups"}
    return ["batch", *(dim if isinstance(dim, int) else names[tokens_each(dim)] for dim in buffer.shape)]
