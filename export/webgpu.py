"""The decoder's graph for ONNX Runtime's WebGPU provider: only operators that it has kernels for, and few of them.

A step of decoding costs a GPU a dispatch for each node that computes something, so the layers are built from the
operators that do most in one:

    attention      com.microsoft.GroupQueryAttention, which appends to the cache in place
    weights        com.microsoft.MatMulNBits with float inputs: no rounding of activations, whose blocks differ between
                   providers; so CPU and GPU compute the same
    embedding      com.microsoft.GatherBlockQuantized; a tied table's codes are stored once

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

Layers that GroupQueryAttention cannot compute (`grouped`) keep DiffAttention's body: correct, with many more nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from torch import Tensor, nn

from ..formats import QTensor, QuantLinear
from ..formats.base import MICROSOFT, Blocks
from ..models import ModelConfig
from ..models.attention._attention import AttentionOptions
from ..models.graph import GROUP_QUERY_MULTIPLE, Cache, Change, Heads
from ..ops.cache import Buffer, CacheSpec
from ..quantize import AttentionScheme
from ..quantize.device_cache import cache_spec
from .decoder_graph import DecoderGraph, shared

HIDDEN = -65504.0  # the bias of padding; finite, so that a query that sees nothing gives no NaN


def grouped(config: ModelConfig, scheme: AttentionScheme) -> bool:
    """Whether GroupQueryAttention can compute all attention layers: float caches that grow, which no other layer reads,
    and heads whose width is a multiple of 8."""
    mixers = [layer.mixer for layer in config.layers]
    attentions = [mixer for mixer in mixers if isinstance(mixer, AttentionOptions)]
    simple = all(not (mixer.sliding_window or mixer.head_dim % GROUP_QUERY_MULTIPLE) for mixer in attentions)
    simple = simple and all(mixer.in_place != "never" for mixer in attentions)  # those with a Change
    return simple and not scheme.is_low_bit and all(mixer.reads is None for mixer in mixers)


def webgpu_cache(config: ModelConfig, scheme: AttentionScheme, dtype: str) -> CacheSpec:
    """Return device_cache.cache_spec with the keys and values of a pair side by side where layers are `grouped`."""
    spec = cache_spec(config, scheme, dtype)
    if not grouped(config, scheme):
        return spec
    return CacheSpec(
        tuple(
            tuple(map(_paired, buffers)) if getattr(layer.mixer, "wide_value", 0) else buffers
            for buffers, layer in zip(spec.layers, config.layers, strict=True)
        )
    )


def _paired(buffer: Buffer) -> Buffer:
    heads, tokens, width = buffer.shape
    assert isinstance(heads, int) and isinstance(width, int)
    return replace(buffer, shape=(heads // 2, tokens, 2 * width), in_place="always")


class WebGPUGraph(DecoderGraph):
    """Builds the graph as its base class does, with other nodes for weights, table and attention."""

    _blocks: Blocks  # of a tied quantized table

    # ---- weights ----

    def low_bit_product(self, x: ir.Value, module: QuantLinear, factor: float) -> ir.Value:
        blocks = module.weight.format.blocks(module.weight)
        return blocks.multiply(self, x, blocks.store(self, factor), 0)

    def stacked_linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> ir.Value | None:
        """Stack three linear layers or more, but not two: their two products take no more dispatches than a product
        and a Split, and ONNX Runtime makes one node of the norm before them, gate, up and the activation
        (MatMulNBitsMlpFusion)."""
        return None if len(modules) == 2 else super().stacked_linears(x, modules)

    def gather_low_bit(self, table: QTensor) -> ir.Value:
        self._blocks = blocks = table.format.blocks(table)
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

    def embed(self, table: Tensor | QTensor) -> None:
        """Add the embedding [V, E]. A tied float table is stored as MatMul reads it, [E, V]."""
        if isinstance(table, QTensor) or not self.config.tie_embeddings:
            return super().embed(table if isinstance(table, QTensor) else table.float())
        self._table = self.weight("embed_tokens.weight", table.float().T.numpy())
        columns = self.op("Gather", [self._table, self.input_ids], axis=1)  # [E, B, S]
        self._x = self.op("Transpose", [columns], perm=[1, 2, 0])

    def tied_head(self, x: ir.Value, head: nn.Module) -> ir.Value:
        if isinstance(head, QuantLinear):
            return self._blocks.multiply(self, x, self._weight, 0)
        return self.op("MatMul", [x, self._table])

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
    ) -> tuple[ir.Value, Cache]:
        wide, ratio = heads.wide_value, heads.noise_ratio
        if key is None or not grouped(self.config, self.attention_scheme) or bool(wide) != (lambda_ is not None):
            return super().attention(query, key, value, lambda_, past, heads, change)
        query, key = self._rotated(query, heads), self._rotated(key, heads)
        softmaxes = heads.num_heads + wide * heads.num_heads // ratio
        if wide:
            query = self._padded_sub_heads(query, heads)
        inputs = [query, key, value, past["key"], past["value"], self._lengths, self._total_scalar]
        out, present_key, present_value = self.ops(
            "GroupQueryAttention",
            [*inputs, None, None, None, self._bias],
            3,
            domain=MICROSOFT,
            num_heads=softmaxes,
            kv_num_heads=heads.num_kv_heads // (1 + wide),
            scale=heads.head_dim**-0.5,
        )
        if lambda_ is not None:
            out = self._difference(out, lambda_, heads)
        return out, {"key": present_key, "value": present_value}

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
