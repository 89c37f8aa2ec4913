"""The decoder's graph with attention by ONNX Runtime's own com.microsoft.GroupQueryAttention, which appends to the
cache in place, in every variant that it can compute.

Differential attention, version 1, is one GroupQueryAttention. The two keys of a kv head, and the two halves of its
value, lie side by side in the cache: [B, KV, tokens, 2d], in place of [B, 2KV, tokens, d]. The queries of a pair become
2d wide:

    [q_s, 0] . [k_s, k_n] = q_s . k_s        [0, q_n] . [k_s, k_n] = q_n . k_n

so the two softmaxes are those of two ordinary heads of width 2d with the scale of d, and each has the whole value. A
step reads the cache once for both. A pair's difference, or that of R signal heads with their noise head (arXiv
2510.06949), is then one product with the constants [1, -lambda], or [I, -lambda]. Multiplying by 1 and 0 and adding 0
are exact.

All rows of a batch have T tokens in the cache, padding included, which a bias hides. RoPE has nodes of its own, because
GroupQueryAttention's takes one position for all rows (docs/artifact.md).

On CPUs a cache may be int8 (fixed_scales.py). Layers that GroupQueryAttention cannot compute (`grouped`) keep
DiffAttention's body: correct, with many more nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import nn

from ..formats import QTensor, QuantLinear, Rounding
from ..formats.base import MICROSOFT, Blocks
from ..models import Block, ModelConfig
from ..models.attention._attention import AttentionOptions
from ..models.graph import GROUP_QUERY_MULTIPLE, Cache, Change, Heads
from ..ops.cache import Buffer, CacheSpec
from ..quantize import AttentionScheme
from ..quantize.device_cache import cache_spec
from .decoder_graph import DecoderGraph, shared
from .fixed_scales import Channels, FixedScales, turning

HIDDEN = -65504.0  # the bias of padding; finite, so that a query that sees nothing gives no NaN


def grouped(config: ModelConfig, scheme: AttentionScheme, target: str) -> bool:
    """Whether GroupQueryAttention computes all attention layers, over a float cache or one with fixed scales."""
    return _is_simple(config) if not scheme.is_low_bit else has_fixed_scales(config, scheme, target)


def has_fixed_scales(config: ModelConfig, scheme: AttentionScheme, target: str) -> bool:
    """Whether the cache is ONNX Runtime's own in int8 (fixed_scales.py)."""
    is_int8 = scheme.keys == scheme.values == "int8" and scheme.qk is None and not scheme.layers
    return target == "onnxruntime" and is_int8 and _is_simple(config)


def _is_simple(config: ModelConfig) -> bool:
    """Whether GroupQueryAttention can compute the layers: caches that grow, which no other layer reads, and heads whose
    width is a multiple of 8."""
    mixers = [layer.mixer for layer in config.layers]
    attentions = [mixer for mixer in mixers if isinstance(mixer, AttentionOptions)]
    simple = all(not (mixer.sliding_window or mixer.head_dim % GROUP_QUERY_MULTIPLE) for mixer in attentions)
    simple = simple and all(mixer.in_place != "never" for mixer in attentions)  # those with a Change
    return simple and all(mixer.reads is None for mixer in mixers)


def grouped_cache(config: ModelConfig, scheme: AttentionScheme, dtype: str, target: str) -> CacheSpec:
    """Return device_cache.cache_spec; where layers are `grouped`, without scales of rows, and with the keys and values
    of a pair side by side."""
    if not grouped(config, scheme, target):
        return cache_spec(config, scheme, dtype)
    kind = "int8" if has_fixed_scales(config, scheme, target) else dtype
    layers = cache_spec(config, AttentionScheme(states=scheme.states), dtype).layers
    return CacheSpec(
        tuple(
            tuple(_stored(buffer, kind, getattr(layer.mixer, "wide_value", 0)) for buffer in buffers)
            if isinstance(layer.mixer, AttentionOptions)
            else buffers
            for buffers, layer in zip(layers, config.layers, strict=True)
        )
    )


def _stored(buffer: Buffer, dtype: str, wide: int) -> Buffer:
    heads, tokens, width = buffer.shape
    assert isinstance(heads, int) and isinstance(width, int)
    shape = (heads // (1 + wide), tokens, width * (1 + wide))
    return replace(buffer, dtype=dtype, shape=shape, in_place="always" if wide else buffer.in_place)


class GroupedGraph(DecoderGraph):
    """Builds the graph as its base class does, with other nodes for attention, and for weights and tables whose format
    is `in_blocks`: com.microsoft.MatMulNBits and GatherBlockQuantized. A tied table's codes are stored once.

    MatMulNBits rounds inputs to int8 in the weights' blocks (accuracy_level 4), or not (0). Weights whose inputs are
    rounded otherwise, as ternary ones, keep their own operator."""

    accuracy_level = 4
    _blocks: Blocks  # of a tied quantized table

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.grouped = grouped(self.config, self.scheme, self.target)
        self._scales: FixedScales | None = None  # of the current layer

    @property
    def low_bit(self) -> bool:
        return super().low_bit and not self.grouped

    def block(self, block: Block, index: int) -> None:
        arithmetic = getattr(block.self_attn, "arithmetic", None)
        self._scales = arithmetic if isinstance(arithmetic, FixedScales) else None
        super().block(block, index)

    # ---- weights ----

    def low_bit_product(self, x: ir.Value, module: QuantLinear, factor: float) -> ir.Value:
        if module.weight.format.in_blocks:
            blocks = self._as_blocks(module.weight)
            if module.rounding == (Rounding(block=blocks.size) if self.accuracy_level else None):
                return blocks.multiply(self, x, blocks.store(self, factor), self.accuracy_level)
        return super().low_bit_product(x, module, factor)

    def _as_blocks(self, weight: QTensor) -> Blocks:
        return weight.format.blocks(weight, rounds=self.accuracy_level > 0)

    def gather_low_bit(self, table: QTensor) -> ir.Value:
        if not table.format.in_blocks:
            return super().gather_low_bit(table)
        self._blocks = blocks = self._as_blocks(table)
        self._weight = codes, scale, zero = blocks.store(self)
        inputs = [codes, self.input_ids, self.op("Unsqueeze", [scale, self.const([-1])])]
        columns = blocks.codes.shape[1]
        if zero is not None:
            inputs.append(self.op("Unsqueeze", [zero, self.const([-1])]))
        rows = self.op(
            "GatherBlockQuantized",
            inputs,
            domain=MICROSOFT,
            bits=blocks.bits,
            block_size=blocks.size,
            gather_axis=0,
            quantize_axis=2,
        )  # [B, S, blocks, size]
        rows = self.op("Reshape", [rows, self.const([0, 0, -1])])
        if columns % blocks.size:
            rows = self.op("Slice", [rows, self.const([0]), self.const([columns]), self.const([2])])
        return rows

    def tied_head(self, x: ir.Value, head: nn.Module) -> ir.Value:
        if not isinstance(head, QuantLinear) or not head.weight.format.in_blocks:
            return super().tied_head(x, head)
        return self._blocks.multiply(self, x, self._weight, self.accuracy_level)

    # ---- attention ----

    @shared
    def _lengths(self) -> ir.Value:
        """int32 [B]: T - 1 for every row, as GroupQueryAttention counts."""
        last = self.op("Sub", [self._tokens, self.const([1], np.int32)])
        return self.op("Expand", [last, self.op("Shape", [self.input_ids], end=1)])

    @shared
    def _tokens(self) -> ir.Value:
        return self.cast(self._total, np.int32)  # [1]: T

    @shared
    def _total_scalar(self) -> ir.Value:
        return self.op("Squeeze", [self._tokens])

    @shared
    def _bias(self) -> ir.Value:
        """[B, 1, S, T]: HIDDEN for padding, else 0."""
        real = self.cast(self.attention_mask, np.bool_)
        row = self.op("Where", [real, self.const(0, self.dtype), self.const(HIDDEN, self.dtype)])
        batch = self.op("Shape", [self.input_ids], end=1)
        shape = self.op("Concat", [batch, self.const([1]), self._length, self._total], axis=0)
        return self.op("Expand", [self.op("Unsqueeze", [row, self.const([1, 2])]), shape])

    def _rotated(self, x: ir.Value, heads: Heads) -> ir.Value:
        if not heads.rope:
            return x
        position_ids, *tables = self._rope(heads)
        if self.dtype is not np.float32:
            tables = [self.cast(table, self.dtype) for table in tables]
        return self.op("RotaryEmbedding", [x, position_ids, *tables], domain=MICROSOFT)

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
        wide, ratio = heads.wide_value, heads.noise_ratio
        if key is None or value is None or not self.grouped or bool(wide) != (lambda_ is not None):
            return super().attention(query, key, value, lambda_, past, heads, change, gates)
        query, key = self._rotated(query, heads), self._rotated(key, heads)
        softmaxes, kv_heads = heads.num_heads + wide * heads.num_heads // ratio, heads.num_kv_heads // (1 + wide)
        fixed, scales = self._scales, list[ir.Value | None]()
        low_bit: dict[str, int | str] = {}
        if fixed is not None:
            query = self._turned(query, heads)
            key = self._centred(key, fixed.keys, "key", heads)
            value = self._centred(value, fixed.values, "value", heads)
            scales = [None, self._scale(fixed.keys, "key", kv_heads), self._scale(fixed.values, "value", kv_heads)]
            low_bit = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        if wide:
            query = self._padded_sub_heads(query, heads)
        inputs = [query, key, value, past["key"], past["value"], self._lengths, self._total_scalar]
        out, present_key, present_value = self.ops(
            "GroupQueryAttention",
            [*inputs, None, None, None, self._bias, *scales],
            3,
            domain=MICROSOFT,
            num_heads=softmaxes,
            kv_num_heads=kv_heads,
            scale=heads.head_dim**-0.5,
            **low_bit,
        )
        if fixed is not None:
            offset = fixed.values.offset.view(kv_heads, -1).repeat_interleave(softmaxes // kv_heads, 0).flatten()
            out = self._turned(self.op("Add", [out, self.weight("output_offset", offset.numpy())]), heads)
        if lambda_ is not None:
            out = self._difference(out, lambda_, heads)
        if gates is not None:
            by_head = self.op("Reshape", [out, self.const([0, 0, heads.num_heads, -1])])
            by_head = self.op("Mul", [by_head, self.cast(self.op("Unsqueeze", [gates, self.const([-1])]), self.dtype)])
            out = self.op("Reshape", [by_head, self.const([0, 0, -1])])
        return out, {"key": present_key, "value": present_value}

    def _turned(self, x: ir.Value, heads: Heads) -> ir.Value:
        """Rotate each d numbers of x [B, S, n * d] as fixed_scales.py says."""
        x = self.op("Reshape", [x, self.const([0, 0, -1, heads.head_dim])])
        x = self.op("MatMul", [x, self.const(turning(heads.head_dim).numpy(), self.dtype)])
        return self.op("Reshape", [x, self.const([0, 0, -1])])

    def _centred(self, rows: ir.Value, channels: Channels, name: str, heads: Heads) -> ir.Value:
        """Return what GroupQueryAttention rounds of keys or values."""
        offset = -channels.offset.flatten()
        return self.op("Add", [self._turned(rows, heads), self.weight(f"{name}_offset", offset.numpy())])

    def _scale(self, channels: Channels, name: str, kv_heads: int) -> ir.Value:
        return self.initializer(f"{name}_scale", channels.scale.view(1, kv_heads, 1, -1).numpy())

    def _padded_sub_heads(self, query: ir.Value, heads: Heads) -> ir.Value:
        """Make the sub-heads [B, S, (H + H/R) * d] twice as wide: signal heads [q, 0], noise heads [0, q]."""
        ratio, width = heads.noise_ratio, heads.head_dim
        sides = np.zeros((ratio + 1, 2, 1))
        sides[:ratio, 0] = sides[ratio, 1] = 1
        query = self.op("Reshape", [query, self.const([0, -1, ratio + 1, 1, width])])
        query = self.op("Mul", [query, self.const(sides, self.dtype)])
        return self.op("Reshape", [query, self.const([0, -1, 2 * width * (heads.num_heads // ratio) * (ratio + 1)])])

    def _difference(self, out: ir.Value, lambda_: ir.Value, heads: Heads) -> ir.Value:
        """Compute signal - lambda * noise and the head norm: [B, S, (H + H/R) * 2d] -> [B, S, H * 2d]."""
        ratio, width = heads.noise_ratio, 2 * heads.head_dim
        assert lambda_.const_value is not None
        noise = -lambda_.const_value.numpy().reshape(-1, ratio, 1)
        weights = np.concatenate((np.broadcast_to(np.eye(ratio), (len(noise), ratio, ratio)), noise), axis=-1)
        out = self.op("Reshape", [out, self.const([0, 0, len(noise), ratio + 1, width])])
        out = self.op("MatMul", [self.const(weights, self.dtype), out])  # [B, S, H/R, R, 2d]
        if heads.norm_eps:
            one = self.const(np.ones(width), self.dtype)
            out = self.op("SimplifiedLayerNormalization", [out, one], axis=-1, epsilon=heads.norm_eps, stash_type=1)
        return self.op("Reshape", [out, self.const([0, 0, -1])])
