"""`diffbit.FloatMatMul`: a product by a weight that is read in place as it lies, a row of floats for each output.

    y_n = sum_k x_k w_nk      float32, whatever x and w are; rounded to T at the end

Sixteen partial sums, those of equal k % 16, are each added up in the order of k by fma, and then in pairs, 1, 2, 4 and
8 apart: every instruction set and number of threads or rows gives the same bits. A GPU adds in another order.

Inputs
    A       T [..., K]         float32 or float16
    W       T [N, K]
Output
    Y       T [..., N]
Attributes: spec_version.

It is a tied float head, whose weight is the embedding's table, and every float16 product of an artifact for CPUs. ONNX
Runtime has a MatMul of [K, N], for which a table would be transposed into a second copy at load, and on CPUs none of
float16, for which it makes copies in float32. The body is that MatMul: what runs without the library.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema

if TYPE_CHECKING:
    import torch

OP = schema.FLOAT_MATMUL
LANES = 16

BODY = """
{
  columns = Transpose <perm = [1, 0]> (W)
  Y = MatMul (A, columns)
}
"""

function = partial(OP.function, BODY)


def reference(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op in torch, but for the order of the sums, in float64: A [..., K], W [N, K] -> [..., N] in A's dtype."""
    return (a.double() @ weight.double().T).to(a.dtype)
