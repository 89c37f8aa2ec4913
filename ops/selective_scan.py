"""`diffbit.SelectiveScan`: Mamba-1's recurrence (arXiv 2312.00752, algorithm 2), N numbers of state for each channel.

    D_t = softplus(dt_t + dt_bias)                  the step size, of each channel
    h_t = exp(D_t A) h_(t-1) + D_t x_t B_t          [N, C]: A for each number, B_t shared by the channels
    m_t = C_t h_t + D x_t
    y_t = m_t silu(z_t)                             silu(z) = z / (1 + exp(-z))

in float32, summing over the N numbers in order. For padding (mask 0), at any position, m and y are 0 and the state is
unchanged.

Inputs
    x, dt, z        T [B, S, C]            float32 or float16
    B, C            T [B, S, N]
    A               float32 [N, C]         negative
    D, dt_bias      float32 [C]
    attention_mask  int64 [B, T], T >= S   only its last S columns are used; 0: padding
    past_state      float32 [B, N, C]      zeros before the first token
Outputs
    y               T [B, S, C]
    memory          T [B, S, C]            m, optional: read by gated memory units (arXiv 2507.06607)
    present_state   float32 [B, N, C]      may share memory with past_state
Attributes: spec_version.

States are [N, C], so that vectors run over channels. The body is a Scan over tokens.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema
from .body import Nodes, Value
from .signature import Type

if TYPE_CHECKING:
    from torch import Tensor

OP = schema.SELECTIVE_SCAN

BLOCK = 16  # tokens whose decays the reference keeps in memory at a time


def body(op: Nodes) -> tuple[Value, Value, Value]:
    *tensors, A, D, dt_bias, attention_mask, past_state = op.inputs
    x, dt, z, B, C = (tensor.cast(Type.FLOAT32) for tensor in tensors)
    total = attention_mask.size(1)
    real = attention_mask.slice(total - x.size(1), total, 1).cast(Type.BOOL).unsqueeze(2)
    size = op("Where", real, op("Softplus", dt + dt_bias), 0.0)

    def token(h: Value, size: Value, input: Value, B: Value, C: Value) -> tuple[Value, Value]:
        h = op("Exp", size.unsqueeze(1) * A) * h + input.unsqueeze(1) * B.unsqueeze(2)
        return h, (C.unsqueeze(1) @ h).squeeze(1)

    types = "float[b, n, c]", "float[b, c]", "float[b, c]", "float[b, n]", "float[b, n]"
    axes = {"scan_input_axes": [1, 1, 1, 1], "scan_output_axes": [1]}
    inputs = past_state, size, size * x, B, C
    present_state, read = op.several(2, "Scan", *inputs, body=op.graph(token, *types), num_scan_inputs=4, **axes)
    memory = op("Where", real, read + D * x, 0.0)
    y = memory * (z * op("Sigmoid", z))
    return y.like(tensors[0]), memory.like(tensors[0]), present_state


function = partial(OP.function, body)


def reference(
    x: Tensor,
    dt: Tensor,
    z: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    past_state: Tensor,
    dt_bias: Tensor | None = None,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in torch, in float64 if x is float64: (y, memory, present_state), the first two in x's dtype.

    real: bool [B, S], the tokens that are not padding; None: all. Gradients pass. Most work is done per block, with one
    small operation per token, which is fast enough for calibration.
    """
    import torch
    import torch.nn.functional as F

    wide = torch.promote_types(x.dtype, torch.float32)
    wide_x, state = x.to(wide), past_state.to(wide)
    size = F.softplus(dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias)
    if real is not None:
        size = torch.where(real[..., None], size, 0)
    read = [wide_x[:, :0]]
    for begin in range(0, x.shape[1], BLOCK):
        part = slice(begin, begin + BLOCK)
        decay = (size[:, part, None] * a).exp()  # [B, T, N, C]
        added = (size * wide_x)[:, part, None] * b[:, part, :, None]
        states = []
        for decay_t, added_t in zip(decay.unbind(1), added.unbind(1), strict=True):
            state = torch.addcmul(added_t, decay_t, state)
            states.append(state)
        read.append((c[:, part, None].to(wide) @ torch.stack(states, 1))[:, :, 0])
    memory = torch.cat(read, 1) + d * wide_x
    if real is not None:
        memory = torch.where(real[..., None], memory, 0)
    return (memory * F.silu(z.to(wide))).to(x.dtype), memory.to(x.dtype), state
