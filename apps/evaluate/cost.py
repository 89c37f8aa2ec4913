"""The cost of one decoded token, computed from a model's shapes and its scheme: bytes read and written, and operations.

For one sequence with `context` tokens in the cache, including the new one. Bytes are those read from, or written to,
memory per token: all weights in their formats, a row of the embedding (in addition to the whole table if it is the
head), and the keys and values that are read and written. Activations stay in CPU caches and are not counted.

Operations:

    ternary   additions of integer activations, one per ternary weight (zero weights count, too)
    integer   multiply-adds of integers of 8 bits or fewer: int8 activations by int2 to int8 weights, low-bit q k^T
    floating  multiply-adds of float matrices: float and nf4 layers, the head, attention
    other     elementwise operations, each counted as a float multiply-add: norms, RoPE, softmax, gates, residual sums,
              rounding of activations, scales, Hadamard transforms (K log2 h additions), dequantized keys and values

Attention is counted as the exported operators compute it: q k^T of n query sub-heads of width d takes n d T
multiply-adds. The product with the values takes n d T, too, in float attention (diff_v1 subtracts first and has one
product of H heads 2d wide; diff_v2 has two products d wide); low-bit attention has one product after the difference.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import log2, prod

import numpy as np

from ...models import LayerSpec, ModelConfig
from ...models.checkpoint import is_linear, shapes, stays_float32
from ...quantize import EMBEDDING_MODULE, AttentionScheme, Scheme, linear_shapes, step_bytes


@dataclass(frozen=True)
class Cost:
    """The cost of one decoded token; see the module's docstring."""

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
        """Operations by kind; elementwise ones count as float."""
        return {"ternary": self.ternary, "integer": self.integer, "float": self.floating + self.other}


def token_cost(config: ModelConfig, scheme: Scheme | None, context: int, dtype: str = "float16") -> Cost:
    """Return the cost for a model under a scheme (None: float); dtype: float16 or float32, of float parts."""
    scheme = scheme or Scheme()
    count = Counter(ternary=0, integer=0, floating=0, other=0)
    width = np.dtype(dtype).itemsize
    nbytes = config.hidden_size * width  # the embedding's row
    formats = scheme.chosen(config)
    for module, (rows, columns) in linear_shapes(config).items():
        format, weights = formats.get(module), rows * columns
        if format is None:
            count["floating"] += weights
            nbytes += weights * width
            continue
        nbytes += format.device_nbytes((rows, columns), width)
        rounding = format.device_rounding(format.rounding(module, columns, scheme.activations))
        if rounding is None:
            count.update(floating=weights, other=rows * format.groups(columns))
        elif format.integer_product:
            block = rounding.hadamard
            transform = columns * int(log2(block)) + columns if block > 1 else 0
            count.update(ternary=weights, other=2 * columns + 2 * rows + transform)
        else:
            count.update(integer=weights, other=2 * columns + rows * format.groups(columns))
    for name, shape in shapes(config).items():
        if is_linear(name) or name == f"{EMBEDDING_MODULE}.weight" or ".lambda_" in name:  # counted, or constants
            continue
        nbytes += prod(shape) * (4 if stays_float32(name) else width)
        count["other"] += prod(shape) * (2 if name.endswith("norm.weight") else name.endswith(".bias"))
    for layer, attention in zip(config.layers, scheme.attention.of_model(config), strict=True):
        count.update(_layer(layer, attention, context, config.hidden_size))
    count["other"] += 2 * config.num_layers * config.hidden_size  # residual sums
    cache = step_bytes(config, scheme.attention, dtype, context)
    return Cost(context, nbytes, cache, **count)


def _layer(layer: LayerSpec, attention: AttentionScheme, context: int, hidden_size: int) -> dict[str, int]:
    """Count the operations of a layer outside its linears and weighted norms."""
    cached = 0  # how many numbers of keys, and of values, are in the cache

    def kv(heads: int, width: int, in_place: str, sliding_window: int) -> tuple[()]:
        nonlocal cached
        cached += heads * width * min(context, sliding_window or context)
        return ()

    layer.mixer.buffers(kv)
    operations = layer.mixer.operations(context, attention.is_low_bit)
    other = operations.other + layer.mlp.operations(hidden_size)
    if attention.value_format.startswith("int"):
        other += cached
    if attention.key_format.startswith("int"):
        other += layer.mixer.softmaxes * context if attention.query_bits else cached
    if attention.query_bits:
        return {"integer": operations.logits, "floating": operations.matrix, "other": other}
    return {"floating": operations.logits + operations.matrix, "other": other}
