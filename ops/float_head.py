"""`diffbit.FloatHead`: a head whose weight is the embedding's table as it lies, rows of floats, read in place.

    y_n = sum_k x_k w_nk      float32, whatever x and w are; rounded to T at the end

Sixteen partial sums, those of equal k % 16, are each added up in the order of k by fma, and then in pairs, 8, 4, 2 and
1 apart: every instruction set and number of threads or rows gives the same bits. A GPU adds in another order.

Inputs
    A       T [..., K]         float32 or float16
    W       T [N, K]
Output
    Y       T [..., N]
Attributes: spec_version.

ONNX Runtime has a MatMul of [K, N], for which the table would be transposed into a second copy at load, and one more of
float32 where the table is float16. The body is that MatMul: what runs without the library.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema

if TYPE_CHECKING:
    import torch

OP = schema.FLOAT_HEAD
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
