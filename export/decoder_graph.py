"""The decoder's graph, one layer at a time: embedding, layers of a mixer and an MLP, final norm, head.

Inputs and outputs carry the names that onnxruntime-genai and optimum look for:

    input_ids int64 [B, S], attention_mask int64 [B, T], position_ids int64 [B, S],
    past_key_values.N.key|value [B, Hk, C, d]   ->   logits fp32 [B, S, V], present.N.key|value [B, Hk, max(C, T), d]

and two optional inputs, which are initializers in the file (onnx_graph.py). `logits_from` int64 [1], 0: the first of
the new tokens whose logits are computed. A prompt only needs the last token's, and with a large vocabulary the head
takes a fifth of the time of a small model. `shorter_by` int64 [1] or [B], 0: how many tokens a row lacks of T, where
attention's operator has all of the cache (ops/diff_attention.py, "Rows of their own length").

Layers after the last one with a cache also compute only the tokens from `logits_from` on; they read values of earlier
layers.

T = past + S: the past's length follows from the mask's, so loaders do not pass it. A low-bit cache has more buffers
than key and value, and other shapes (quantize/device_cache.py); other mixers have other states. Values that all layers
share (lengths, RoPE tables) are made once, on first use, so that a graph contains only what its layers need. Mixers and
MLPs add their nodes in their `onnx` methods, through the protocol in models/graph.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ..formats import QTensor, QuantLinear
from ..formats.base import StoredWeight
from ..models import Block, ModelConfig, rope_tables
from ..models.graph import GROUP_QUERY_MULTIPLE, Cache, Change, Heads
from ..ops import diff_attention_body, float_matmul
from ..ops.body import END
from ..ops.cache import Buffer, CacheSpec
from ..ops.diff_attention import Signature
from ..quantize import AttentionScheme
from ..quantize.device_cache import operator
from ..runtime.artifact import LOGITS_FROM, SHORTER_BY
from .onnx_graph import DATA, OnnxGraph

HALVES: dict[torch.dtype, type] = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}

G = TypeVar("G", bound="DecoderGraph")
T = TypeVar("T")


def shared(make: Callable[[G], T]) -> cached_property[T]:
    """Make a property whose value is computed once, at first use, with a name outside the layers' scopes."""

    def in_no_scope(graph: G) -> T:
        with graph.scope(None):
            return make(graph)

    in_no_scope.__doc__ = make.__doc__
    return cached_property(in_no_scope)


class DecoderGraph(OnnxGraph):
    """Builds the graph in order: `embed`, `block` for each layer, `head`, `save`. Weights are written immediately.
    models.Block says how the parts of a layer follow one another.

    dtype: "fp32" or "fp16". target: onnx_graph.py. scheme: of attention; cache: the resulting buffers of
    each layer.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        config: ModelConfig,
        context_length: int,
        scheme: AttentionScheme,
        cache: CacheSpec,
        target: str = "cpu",
        data: str = DATA,
    ) -> None:
        super().__init__(folder, dtype, target, data)
        self.config, self.attention_scheme, self.cache, self.target = config, scheme, cache, target
        self.scheme = scheme  # that of the layer which is added
        self.carried: dict[int, Cache] = {}
        self._schemes = scheme.of_model(config)
        self._tables = [table.numpy() for table in rope_tables(config, context_length)]
        self.input_ids = self.input("input_ids", np.int64, ["batch_size", "sequence"])
        self.attention_mask = self.input("attention_mask", np.int64, ["batch_size", "total_sequence"])
        self.position_ids = self.input("position_ids", np.int64, ["batch_size", "sequence"])
        self._past = [
            {
                buffer.name: self.input(f"past_key_values.{i}.{buffer.name}", buffer.dtype, _named(buffer, "past"))
                for buffer in layer
            }
            for i, layer in enumerate(cache.layers)
        ]
        self._present: list[Cache] = []
        self._has_rows = target == "cpu"  # whether rows can have lengths of their own
        self._rings = any(buffer.ring for buffer in cache.buffers.values())
        self._tail = 1 + max(i for i, layer in enumerate(cache.layers) if layer)  # the first that needs few tokens
        self._x: ir.Value
        self._added: ir.Value | None = None  # to x, by the next norm's node
        self._table: ir.Value  # of a tied head, float
        self._stored: StoredWeight  # the same, quantized

    @property
    def low_bit(self) -> bool:
        return self.attention_scheme.is_low_bit

    @shared
    def _length(self) -> ir.Value:
        return self.op("Shape", [self.input_ids], start=1)  # int64 [1]: S

    @shared
    def _total(self) -> ir.Value:
        return self.op("Shape", [self.attention_mask], start=1)  # int64 [1]: T

    @shared
    def past_length(self) -> ir.Value:
        """int64 [1]: T - S."""
        return self.op("Sub", [self._total, self._length])

    @shared
    def shorter_by(self) -> ir.Value:
        """int64 [1] or [B]: how many tokens a row lacks of T."""
        return self.optional_input(SHORTER_BY, np.zeros(1, np.int64))

    @shared
    def past_lengths(self) -> ir.Value:
        """int64 [1] or [B]: the past lengths of the rows."""
        return self.op("Sub", [self.past_length, self.shorter_by])

    @shared
    def real_tokens(self) -> ir.Value:
        """bool [B, S]: the new tokens that are not padding."""
        new = self.op("Slice", [self.attention_mask, self.past_length, self._total, self.const([1])])
        return self.cast(new, np.bool_)

    @shared
    def logits_from(self) -> ir.Value:
        """int64 [1]: the first of the new tokens whose logits are computed."""
        return self.optional_input(LOGITS_FROM, np.zeros(1, np.int64))

    @shared
    def cos(self) -> ir.Value:
        """fp32 [context_length, d/2]."""
        return self.initializer("cos", self._tables[0])

    @shared
    def sin(self) -> ir.Value:
        return self.initializer("sin", self._tables[1])

    @shared
    def local_cos(self) -> ir.Value:
        """fp32 [context_length, d/2], of layers with local_rope."""
        return self.initializer("local_cos", self._tables[2])

    @shared
    def local_sin(self) -> ir.Value:
        return self.initializer("local_sin", self._tables[3])

    def _rope(self, heads: Heads) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return (position_ids, cos, sin) for heads; without rope, of a rotation by 0."""
        if heads.rope:
            tables = (self.local_cos, self.local_sin) if heads.local_rope else (self.cos, self.sin)
            return self.position_ids, *tables
        cos, sin = (self.const(np.full((1, heads.head_dim // 2), value), np.float32) for value in (1, 0))
        return self.op("Sub", [self.position_ids, self.position_ids]), cos, sin

    def rotated(self, x: ir.Value) -> ir.Value:
        """Add RoPE of heads x, float32 [B, S, heads, d]; attention's operator does this itself."""
        tables = (self.op("Gather", [table, self.position_ids]) for table in (self.cos, self.sin))
        cos, sin = (self.op("Unsqueeze", [table, self.const([2])]) for table in tables)  # [B, S, 1, d/2]
        low, high = self.ops("Split", [x], 2, axis=-1, num_outputs=2)
        low, high = (
            self.op(sign, [self.op("Mul", [one, cos]), self.op("Mul", [other, sin])])
            for sign, one, other in (("Sub", low, high), ("Add", high, low))
        )
        return self.op("Concat", [low, high], axis=-1)

    def attention(
        self,
        query: ir.Value,
        key: ir.Value | None,
        value: ir.Value | None,
        lambda_: ir.Value | None,
        past: Cache,
        heads: Heads,
        change: Change | None = None,
        gates: ir.Value | None = None,
    ) -> tuple[ir.Value, Cache]:
        branches, appends, gated = 1 if lambda_ is None else 2, key is not None, gates is not None
        signature = operator(self.scheme, branches, heads.noise_ratio, heads.sliding_window, appends, gated)
        simple = appends and heads.rope and not (self.low_bit or self._rings)
        grouped = branches == 1 and simple and not change and not heads.head_dim % GROUP_QUERY_MULTIPLE
        self._has_rows &= change is None
        past_length = self.past_lengths if self._has_rows else self.past_length
        if not appends:  # queries may be only the last of the new tokens
            before = self.op("Sub", [self._length, self.op("Shape", [query], start=1, end=2)])
            past_length = self.op("Add", [past_length, before])
        position_ids, cos, sin = self._rope(heads)
        values = {
            "query": query,
            "key": key,
            "value": value,
            "lambda": lambda_,
            "past_length": past_length,
            "position_ids": position_ids,
            "cos": cos,
            "sin": sin,
            "attention_mask": self.attention_mask,
            "gates": gates,
        }
        values |= {f"past_{name}": buffer for name, buffer in past.items()}
        op, more = change or (diff_attention_body, ())
        outputs = self.customs(
            op,
            [*(values.get(name) for name in signature.inputs), *more],
            len(signature.outputs),
            lambda name: op.function(signature, grouped, name),
            variant=(signature, grouped),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            wide_value=heads.wide_value,
            scale=heads.head_dim**-0.5,
            norm_eps=heads.norm_eps,
            **self._float16_tokens(heads),
            **signature.attributes,
        )
        by_name = {}
        for name, value in zip(signature.outputs, outputs, strict=True):
            if name:
                by_name[name] = value
            else:
                value.name = ""  # marks an omitted output in ONNX
        return by_name["out"], {name: by_name[f"present_{name}"] for name in past} if appends else {}

    def attention_inputs(self, past: Cache, heads: Heads, branches: int) -> tuple[Signature, dict[str, int], Cache]:
        self._has_rows = False
        position_ids, cos, sin = self._rope(heads)
        values = {"past_length": self.past_length, "position_ids": position_ids, "cos": cos, "sin": sin}
        values |= {"attention_mask": self.attention_mask, **{f"past_{name}": buffer for name, buffer in past.items()}}
        signature = operator(self.scheme, branches, heads.noise_ratio, heads.sliding_window)
        return signature, self._float16_tokens(heads), values

    def _float16_tokens(self, heads: Heads) -> dict[str, int]:
        """Return the attributes for what a low-bit cache keeps in float16."""
        window = self.scheme.window if self.scheme.has_window else 0
        return {"window": window, "first": self.scheme.first_tokens(heads.sliding_window)}

    def embed(self, table: Tensor | QTensor) -> None:
        """Add the embedding [V, E]. A float32 graph keeps a 16-bit table: half the bytes, the same numbers."""
        if isinstance(table, QTensor):
            with self.scope("embed_tokens"):
                self._x = self.gather_low_bit(table)
            return
        name = "embed_tokens.weight"
        if table.dtype in HALVES and self.dtype is np.float32 and not self.config.tie_embeddings:
            stored = self.initializer(name, table.view(torch.int16).numpy().view(HALVES[table.dtype]))
            self._x = self.cast(self.op("Gather", [stored, self.input_ids]), np.float32)
            return
        self._table = self.weight(name, table.float().numpy())  # a tied head multiplies by it, too
        self._x = self.op("Gather", [self._table, self.input_ids])

    def gather_low_bit(self, table: QTensor) -> ir.Value:
        """Add a quantized table and the operator that reads its rows `input_ids`."""
        self._stored = table.format.store(self, table)
        return table.format.gather(self, self.input_ids, self._stored, table.shape)

    def tied_head(self, x: ir.Value, head: nn.Module) -> ir.Value:
        """Add the product with the embedding's table."""
        if isinstance(head, QuantLinear):
            return head.weight.format.product(self, x, self._stored, head.weight.shape, 1.0)
        return self.custom(float_matmul, [x, self._table])

    def residual(self, norm: nn.Module, name: str) -> ir.Value:
        """Return the residual stream through a norm. The norm's node also adds what was added last."""
        added, self._added = self._added, None
        if added is None:
            return self.norm(self._x, norm, name)
        if isinstance(norm, nn.Identity):
            self._x = self.op("Add", [self._x, added])
            return self._x
        self._x, normed = self.add_norm(self._x, added, norm, name)
        return normed

    def add_residual(self, x: ir.Value) -> None:
        """Add x to the residual stream, in the node of the next norm."""
        self._added = x

    def set_residual(self, x: ir.Value) -> None:
        """Replace the residual stream by x."""
        self._x, self._added = x, None

    def block(self, block: Block, index: int) -> None:
        """Add decoder layer `index`; its linears are float or QuantLinear."""
        if index == self._tail:
            self._leave_tokens()
        self.scheme = self._schemes[index]
        with self.scope(f"layers.{index}"):
            past = self._past[index]
            states = [part.name for part in self.cache.layers[index] if part.dtype == "int8" and not part.holds_tokens]
            for name in states:
                scale = self.op("Unsqueeze", [past[f"{name}_scale"], self.const([-1])])
                past[name] = self.op("Mul", [self.cast(past[name], np.float32), scale])
            present = block.onnx(self, past)
            for name in states:  # as ops/kv_cache.py rounds rows
                largest = self.op("ReduceMax", [self.op("Abs", [present[name]]), self.const([-1])], keepdims=1)
                scale = self.op("Div", [largest, self.const(127, np.float32)])
                zero = self.op("Equal", [scale, self.const(0, np.float32)])
                codes = self.op("Div", [present[name], self.op("Where", [zero, self.const(1, np.float32), scale])])
                present[name] = self.cast(self.op("Round", [codes]), np.int8)
                present[f"{name}_scale"] = self.op("Squeeze", [scale, self.const([-1])])
            self._present.append(present)

    def _last_tokens(self, x: ir.Value) -> ir.Value:
        """Return the part of x [B, S, ...] from `logits_from` on."""
        return self.op("Slice", [x, self.logits_from, self.const([END]), self.const([1])])

    def _leave_tokens(self) -> None:
        """Continue with only the tokens from `logits_from` on; keys and values of all tokens stay available."""
        self._x = self._last_tokens(self._x)
        self._added = None if self._added is None else self._last_tokens(self._added)
        self.position_ids = self._last_tokens(self.position_ids)
        for index, values in self.carried.items():
            buffers = {buffer.name for buffer in self.cache.layers[index]}
            self.carried[index] = {
                name: value if name in buffers else self._last_tokens(value) for name, value in values.items()
            }

    def head(self, norm: nn.Module, head: nn.Module | None) -> None:
        """Add the final norm, the head (tied: with the embedding's table; None: none) and the graph's outputs."""
        x = self.residual(norm, "norm")
        if self._tail == self.config.num_layers:
            x = self._last_tokens(x)
        name, width = ("hidden_states", self.config.hidden_size) if head is None else ("logits", self.config.vocab_size)
        if head is not None:
            x = self.tied_head(x, head) if self.config.tie_embeddings else self.linear(x, head, "lm_head")
        if self.dtype is not np.float32:
            x = self.cast(x, np.float32)
        self.output(name, x, np.float32, ["batch_size", "logits", width])
        if not self._has_rows and "shorter_by" in vars(self):  # a layer that has one length for all rows came later
            self.optional_inputs.remove(SHORTER_BY)
        for index, present in enumerate(self._present):
            for buffer in self.cache.layers[index]:
                name = f"present.{index}.{buffer.name}"
                self.output(name, present[buffer.name], buffer.dtype, _named(buffer, "present"))


def _named(buffer: Buffer, when: str) -> list[int | str]:
    """Return the buffer's shape with names for varying dimensions."""
    return ["batch_size", *(size or f"{when}_sequence" for size in buffer.fixed)]
