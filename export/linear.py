"""Weight formats as ONNX nodes: the one place that knows which runtime operator multiplies by which format.

    format           operator                    weight in the file
    float            MatMul                      [K, N] in the graph's dtype
    int2             com.microsoft.MatMulNBits   2-bit codes; groups of 16: 4-bit codes (there is no 2-bit int8 kernel)
    int3, int4       diffbit.Int4MatMul          groups of 32, 64 and 128: 4-bit codes (ops/int4_matmul.py)
                     com.microsoft.MatMulNBits   groups of 16 and 256, one scale per row: 4-bit codes
    int5 to int8     com.microsoft.MatMulNBits   8-bit codes
    nf4              com.microsoft.MatMulBnb4    bitsandbytes' own bytes
    other codebooks  Gather, Mul, MatMul         bytes as nf4's; looked up once, at load, into floats
    ternary          diffbit.TernaryMatMul       2 bits a weight (ops/ternary_matmul.py), behind a diffbit.Hadamard
                                                 where the layer's rounding has one (quantize/rounding.py)

MatMulNBits has no 3-, 5-, 6- or 7-bit kernels, so their codes travel in the next larger container: code - zero is the
same number there. One scale per row becomes blocks of 128 that repeat it, and so do 2-bit groups of 256. Accuracy
level 4: the operator rounds its input to int8, one scale per block of the weight (quantize/linear.py); the levels below
are fifty times slower at 2 and 8 bits. Int4MatMul computes the same, from a layout that diffbit's kernels read as it
lies.

A factor on the output ((1 - lambda_init) of diff_v1, arXiv 2410.05258 eq. 3) goes into the weight or its scales;
Int4MatMul takes it beside its scales, which are float16 and exact, and behind TernaryMatMul it has a node of its own:
there the graph's numbers are those of training, to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch.nn.functional as F
from torch import nn

from ..ops import hadamard, int4_matmul, ternary_matmul
from ..quantize.formats import NF4, CodebookFormat
from ..quantize.linear import QuantLinear, container
from ..quantize.packing import pack_bits
from ..quantize.qtensor import QTensor
from ..quantize.rounding import Rounding
from .graph import MICROSOFT, Graph

ACCURACY_LEVEL = 4  # int8 activations
BNB_NF4 = 1  # MatMulBnb4's quant_type


def emit(g: Graph, x: ir.Value, module: nn.Linear | QuantLinear, scale: float) -> ir.Value:
    """The node for scale * (x W^T); see the module's docstring."""
    if isinstance(module, nn.Linear):
        transposed = (module.weight.detach().float() * scale).T.contiguous()
        return g.op("MatMul", [x, g.weight("weight", transposed.numpy())])
    if module.weight.format.kind == "ternary":
        return _ternary(g, x, module.weight, scale, module.rounding)
    kinds = {"int": _integer, "codebook": _codebook}
    return kinds[module.weight.format.kind](g, x, module.weight, scale)


def _integer(g: Graph, x: ir.Value, weight: QTensor, scale: float) -> ir.Value:
    format, (rows, columns) = weight.format, weight.shape
    bits, block = container(format)
    blocks = -(-columns // block)
    codes, zero = weight.codes, weight.zero
    if format.symmetric and bits != format.bits:
        codes = codes + (2 ** (bits - 1) - 2 ** (format.bits - 1))  # the container's implicit zero point
    if bits == 4 and format.group_size in int4_matmul.GROUP_SIZES:
        return _int4(
            g, x, int4_matmul.pack(codes, weight.scale, zero, block), scale, K=columns, N=rows, group_size=block
        )
    repeat = blocks if not format.group_size else format.group_size // block
    steps = (weight.scale * scale).repeat_interleave(repeat, 1)[:, :blocks]
    packed = pack_bits(F.pad(codes, (0, blocks * block - columns)), bits)
    inputs = [
        x,
        g.initializer("codes", packed.view(rows, blocks, block * bits // 8).numpy()),
        g.weight("scale", steps.numpy()),
    ]
    if zero is not None:
        zeros = zero.repeat_interleave(repeat, 1)[:, :blocks]
        inputs.append(g.initializer("zero", pack_bits(zeros, bits).numpy()))
    return g.op(
        "MatMulNBits",
        inputs,
        domain=MICROSOFT,
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
        accuracy_level=ACCURACY_LEVEL,
    )


def _int4(g: Graph, x: ir.Value, weight: int4_matmul.Packed, scale: float, **attributes: Any) -> ir.Value:
    symmetric = weight.zeros.numel() == 1
    inputs = [
        x,
        g.initializer("codes", weight.codes.numpy()),
        g.initializer("scale", weight.scales.numpy()),
        g.const(weight.zeros, np.uint8) if symmetric else g.initializer("zero", weight.zeros.numpy()),
        g.const([scale], np.float32),
    ]
    return g.custom(int4_matmul, inputs, **attributes)


def _codebook(g: Graph, x: ir.Value, weight: QTensor, scale: float) -> ir.Value:
    format, (rows, columns) = weight.format, weight.shape
    assert isinstance(format, CodebookFormat)
    packed, steps = weight.packed(), weight.scale * scale
    if format.codebook == NF4:
        return g.op(
            "MatMulBnb4",
            [x, g.initializer("codes", packed.flatten().numpy()), g.weight("absmax", steps.flatten().numpy())],
            domain=MICROSOFT,
            K=columns,
            N=rows,
            block_size=format.group_size,
            quant_type=BNB_NF4,
        )
    codes = g.initializer("codes", packed.unsqueeze(-1).numpy())  # [N, K/2, 1]: two nibbles, the high one first
    high = g.op("BitShift", [codes, g.const(4, np.uint8)], direction="RIGHT")
    pairs = g.op("Concat", [high, g.op("BitwiseAnd", [codes, g.const(15, np.uint8)])], axis=-1)
    blocks = g.op("Reshape", [g.cast(pairs, np.int64), g.const([rows, -1, format.group_size])])
    values = g.op("Gather", [g.const(format.codebook, g.dtype), blocks])
    values = g.op("Mul", [values, g.weight("absmax", steps.unsqueeze(-1).numpy())])  # [N, G, group]
    table = g.op("Reshape", [values, g.const([rows, columns])])
    return g.op("MatMul", [x, g.op("Transpose", [table], perm=[1, 0])])


def _ternary(g: Graph, x: ir.Value, weight: QTensor, scale: float, rounding: Rounding) -> ir.Value:
    rows, columns = weight.shape
    if rounding.hadamard > 1:
        x = g.custom(hadamard, [x], block=rounding.hadamard)
    inputs = [
        x,
        g.initializer("codes", weight.packed().numpy()),
        g.initializer("scale", weight.scale.view(1).numpy()),
    ]
    y = g.custom(ternary_matmul, inputs, K=columns, N=rows, activation_bits=rounding.bits)
    return y if scale == 1 else g.op("Mul", [y, g.const(scale, g.dtype)])
