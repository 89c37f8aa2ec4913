"""`diffbit.SiluGate`: what a gated MLP has between its products (arXiv 2002.05202, eq. 6).

    y = silu(g) u,    (g, u) the halves of a row;  silu(g) = g / (1 + exp(-g))

in float32, rounded to T at the end. Its last bit depends on the exponential of the device.

Inputs
    A       T [..., 2 N]         float32 or float16; first g, then u
Output
    Y       T [..., N]
Attributes: spec_version.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema
from .body import Nodes, Value
from .signature import Type

if TYPE_CHECKING:
    from torch import Tensor

OP = schema.SILU_GATE


def body(op: Nodes) -> Value:
    (A,) = op.inputs
    g, u = op.split(A.cast(Type.FLOAT32), -1, 2)
    return (g * op("Sigmoid", g) * u).like(A)


function = partial(OP.function, body)


def reference(a: Tensor) -> Tensor:
    """Compute the op in torch: A [..., 2 N] float -> [..., N] in A's dtype."""
    import torch.nn.functional as F

    g, u = a.float().chunk(2, -1)
    return (F.silu(g) * u).to(a.dtype)
