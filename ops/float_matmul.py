"""`diffbit.FloatMatMul`: a product with a weight that is read in place, a row of floats for each output.

    y_n = sum_k x_k w_nk      float32, whatever x and w are; rounded to T at the end

Sixteen partial sums, one for each k % 16, are accumulated by fma in the order of k, and then added in pairs, 1, 2, 4
and 8 apart, so the result is bit-identical for every instruction set and number of threads or rows. A GPU adds in
another order.

Inputs
    A       T [..., K]         float32 or float16
    W       T [N, K]
Output
    Y       T [..., N]
Attributes: spec_version.

It is used for a tied float head, whose weight is the embedding's table, and for every float16 product of an artifact
for CPUs. ONNX Runtime's MatMul takes [K, N], so it would transpose the table into a second copy at load; on CPUs it has
no float16 product and makes copies in float32. The body, which runs without the library, is that MatMul.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema
from .body import Nodes, Value

if TYPE_CHECKING:
    import torch

OP = schema.FLOAT_MATMUL


def body(op: Nodes) -> Value:
    A, W = op.inputs
    return A @ W.transpose(1, 0)


function = partial(OP.function, body)


def reference(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the op in torch, in float64 and in another order of sums: A [..., K], W [N, K] -> [..., N]."""
    return (a.double() @ weight.double().T).to(a.dtype)
