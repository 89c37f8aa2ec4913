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

if TYPE_CHECKING:
    from torch import Tensor

OP = schema.SELECTIVE_SCAN

BLOCK = 16  # tokens whose decays the reference keeps in memory at a time

BODY = """
{
  one = Constant <value_ints = [1]> ()
  last = Constant <value_ints = [2]> ()
  steps = Shape <start = 1, end = 2> (x)
  total = Shape <start = 1, end = 2> (attention_mask)
  first = Sub (total, steps)
  fresh = Slice (attention_mask, first, total, one)
  real_flat = Cast <to = 9> (fresh)
  real = Unsqueeze (real_flat, last)
  nothing = Constant <value_float = 0.0> ()

  x_f = Cast <to = 1> (x)
  dt_f = Cast <to = 1> (dt)
  B_f = Cast <to = 1> (B)
  C_f = Cast <to = 1> (C)
  z_f = Cast <to = 1> (z)
  biased = Add (dt_f, dt_bias)
  size = Softplus (biased)
  sizes = Where (real, size, nothing)
  inputs = Mul (sizes, x_f)
  present_state, read = Scan <
    num_scan_inputs = 4,
    scan_input_axes = [1, 1, 1, 1],
    scan_output_axes = [1],
    body = token (float[b, n, c] h, float[b, c] size_t, float[b, c] input_t, float[b, n] B_t, float[b, n] C_t)
        => (float[b, n, c] next, float[b, c] read_t) {
      size_row = Unsqueeze (size_t, one)
      exponent = Mul (size_row, A)
      decay = Exp (exponent)
      decayed = Mul (decay, h)
      input_row = Unsqueeze (input_t, one)
      B_column = Unsqueeze (B_t, last)
      added = Mul (input_row, B_column)
      next = Add (decayed, added)
      C_row = Unsqueeze (C_t, one)
      read_row = MatMul (C_row, next)
      read_t = Squeeze (read_row, one)
    }
  > (past_state, sizes, inputs, B_f, C_f)

  skipped = Mul (D, x_f)
  everywhere = Add (read, skipped)
  m = Where (real, everywhere, nothing)
  memory = CastLike (m, x)
  sigmoid = Sigmoid (z_f)
  gate = Mul (z_f, sigmoid)
  gated = Mul (m, gate)
  y = CastLike (gated, x)
}
"""

function = partial(OP.function, BODY)


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
    for at in range(0, x.shape[1], BLOCK):
        part = slice(at, at + BLOCK)
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
