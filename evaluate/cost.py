"""What one decoded token costs, counted from a model's shapes and its scheme: bytes moved and operations.

Of one sequence with `context` tokens in the cache, the new one among them. Bytes are those that come from, or go to,
memory once a token: all weights in their formats, a row of the embedding (beside the whole table where it is the head),
the keys and values that are read and those that are written. Activations stay in caches and are not counted.

Operations:

    ternary   additions of integer activations, one a ternary weight (a weight of 0 counts too)
    integer   multiply-adds of integers of 8 bits or fewer: int8 activations by int2 to int8 weights, low-bit q k^T
    floating  multiply-adds of float matrices: float and nf4 layers, the head, attention
    other     what is done element by element, each a float multiply-add: norms, RoPE, softmax, gates, residual sums,
              rounding of activations, scales, Hadamard transforms (K log2 h additions), keys and values out of codes

Attention is counted as the exported operators compute it: n query sub-heads of width d take n d T multiply-adds for
q k^T. For the product with the values float attention takes n d T, too (diff_v1 subtracts first and has one product of
H heads 2d wide; diff_v2 has two products d wide), low-bit attention one product after the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, prod
from typing import Any

import torch

from ..models import Block, ModelConfig, variant
from ..models.layout import shapes
from ..quantize import Scheme, linear_shapes
from ..quantize.cache import is_low_bit, step_bytes

WIDTHS = {"float16": 2, "float32": 4}


@dataclass(frozen=True)
class Cost:
    """Of one decoded token; see the module's docstring."""

    context: int
    weight_bytes: int  # of linear layers, head, norms and the embedding's row
    cache_bytes: float  # read and written
    ternary: int
    integer: int
    floating: int
    other: int

    @property
    def nbytes(self) -> float:
        return self.weight_bytes + self.cache_bytes

    @property
    def operations(self) -> dict[str, int]:
        """By kind; what is done element by element is float, too."""
        return {"ternary": self.ternary, "integer": self.integer, "float": self.floating + self.other}


def token_cost(config: ModelConfig, scheme: Scheme | None, context: int, dtype: str = "float16") -> Cost:
    """Of a model under a scheme (None: float); dtype, float16 or float32: of what is not quantized, cache included."""
    scheme = scheme or Scheme()
    formats, linears = scheme.formats(config), linear_shapes(config)
    count = {"ternary": 0, "integer": 0, "floating": 0, "other": 0}
    nbytes = config.hidden_size * WIDTHS[dtype]  # the embedding's row
    for module, (rows, columns) in linears.items():
        format, weights = formats.get(module), rows * columns
        if format is None:
            count["floating"] += weights
            nbytes += weights * WIDTHS[dtype]
            continue
        nbytes += format.device_nbytes((rows, columns), WIDTHS[dtype])
        rounding = format.device_rounding(format.rounding(module, columns, scheme.activations))
        if rounding is not None and format.integer_product:
            count["ternary"] += weights
            block = rounding.hadamard
            count["other"] += 2 * columns + 2 * rows + (columns * int(log2(block)) + columns if block > 1 else 0)
        elif rounding is not None:
            count["integer"] += weights
            count["other"] += 2 * columns + rows * format.groups(columns)
        else:
            count["floating"] += weights
            count["other"] += rows * format.groups(columns)
    norms = [shape for name, shape in shapes(config).items() if name.endswith("norm.weight")]
    nbytes += sum(prod(shape) for shape in norms) * WIDTHS[dtype]
    count["other"] += 2 * sum(prod(shape) for shape in norms)
    for kind, number in _layer(config, scheme, context).items():
        count[kind] += config.num_layers * number
    cache = step_bytes(config, scheme.attention, dtype, context)
    return Cost(context, nbytes, cache, **count)


def _layer(config: ModelConfig, scheme: Scheme, context: int) -> dict[str, int]:
    """Operations of a layer outside its linears and weighted norms."""
    attention = scheme.attention
    with torch.device("meta"):
        block: Any = Block(config, 0)
    layer: Any = block.self_attn
    width, out = config.head_dim, layer.o_proj.in_features
    queries = layer.q_proj.out_features // width  # sub-heads: softmaxes
    paired = queries != config.num_heads
    products, mixed = queries * width * context, queries * width * context
    other = 2 * queries * context + 2 * (layer.q_proj.out_features + layer.k_proj.out_features)  # softmax, RoPE
    if is_low_bit(attention):
        mixed = out * context
    if paired:  # the difference, of weights or of results
        after = not is_low_bit(attention) and out != layer.q_proj.out_features
        other += out if after else queries // 2 * context
    if hasattr(layer, "norm_eps"):
        other += 2 * out  # the heads' norm
    heads = variant(config.attention).Attention.cache_heads(config)
    if attention.value_format.startswith("int"):
        other += heads * width * context
    if attention.key_format.startswith("int"):
        other += queries * context if attention.query_bits else heads * width * context
    gate = 3 if config.mlp == "swiglu" else 2
    other += gate * config.intermediate_size + 2 * config.hidden_size
    kind = "integer" if attention.query_bits else "floating"
    found = {"floating": mixed, "other": other}
    return found | {kind: found.get(kind, 0) + products}
