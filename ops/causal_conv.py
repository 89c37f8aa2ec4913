"""`diffbit.CausalConv`: a causal depthwise convolution over tokens, then SiLU (Mamba, arXiv 2312.00752, figure 3).

    y_t = silu(bias + sum_k weight_k x_(t-K+1+k)),  k = 0 ... K - 1,        silu(s) = s / (1 + exp(-s))

in float32, summed in the order of k. Padding (mask 0) at any position is skipped: sums take the tokens before it, its
own y is 0, and it does not change the state.

Inputs
    x               T [B, S, C]            float32 or float16
    weight          float32 [K, C]         K >= 2
    bias            float32 [C]
    attention_mask  int64 [B, T], T >= S   only its last S columns are used; 0: padding
    past_state      float32 [B, K-1, C]    the last K - 1 tokens before x, the latest last; zeros before the first
Outputs
    y               T [B, S, C]
    present_state   float32 [B, K-1, C]    may share memory with past_state
Attributes: spec_version.

The body numbers the tokens that count, all of the state and those of x that are not padding, and gathers by number.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import schema

if TYPE_CHECKING:
    from torch import Tensor

OP = schema.CAUSAL_CONV

BODY = """
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  zero_0d = Constant <value_int = 0> ()
  one_0d = Constant <value_int = 1> ()
  last = Constant <value_ints = [2]> ()
  batch = Shape <start = 0, end = 1> (x)
  steps = Shape <start = 1, end = 2> (x)
  channels = Shape <start = 2, end = 3> (x)
  total = Shape <start = 1, end = 2> (attention_mask)
  width = Shape <start = 0, end = 1> (weight)
  kept = Sub (width, one)
  length = Add (kept, steps)

  x_f = Cast <to = 1> (x)
  rows = Concat <axis = 1> (past_state, x_f)
  flat_shape_0 = Mul (batch, length)
  flat_shape = Concat <axis = 0> (flat_shape_0, channels)
  flat = Reshape <allowzero = 1> (rows, flat_shape)
  length_0d = Squeeze (length, zero)
  batch_0d = Squeeze (batch, zero)
  begins_flat = Range (zero_0d, batch_0d, one_0d)
  begins_col = Unsqueeze (begins_flat, one)
  begins = Mul (begins_col, length)

  # [B, K-1+S]: 1 where a row counts; its number among these, from 1; and the other way round, the row of each number
  first = Sub (total, steps)
  fresh = Slice (attention_mask, first, total, one)
  past_shape = Concat <axis = 0> (batch, kept)
  past_ones = Expand (one, past_shape)
  counted = Concat <axis = 1> (past_ones, fresh)
  numbers = CumSum (counted, one_0d)
  places = Range (zero_0d, length_0d, one_0d)
  counted_shape = Shape (counted)
  all_places = Expand (places, counted_shape)
  nowhere = Expand (length, counted_shape)
  indices = Sub (numbers, one)
  row_of = ScatterElements <axis = 1, reduction = "min"> (nowhere, indices, all_places)

  own = Slice (numbers, kept, length, one)
  oldest = Sub (own, width)
  sum_shape = Shape (x)
  before = Expand (bias, sum_shape)
  width_0d = Squeeze (width, zero)
  always = Constant <value = bool {1}> ()
  sums = Loop (width_0d, always, before) <
    body = tap (int64 k, bool go, float[b, s, c] sum) => (bool go_on, float[b, s, c] added) {
      go_on = Identity (go)
      number = Add (oldest, k)
      number_of = Max (number, zero)
      place = GatherElements <axis = 1> (row_of, number_of)
      at = Add (place, begins)
      row = Gather <axis = 0> (flat, at)
      factor = Gather <axis = 0> (weight, k)
      product = Mul (row, factor)
      added = Add (sum, product)
    }
  >
  sigmoid = Sigmoid (sums)
  silu = Mul (sums, sigmoid)
  silu_t = CastLike (silu, x)
  real = Cast <to = 9> (fresh)
  real_rows = Unsqueeze (real, last)
  nothing_f = Constant <value_float = 0.0> ()
  nothing = CastLike (nothing_f, x)
  y = Where (real_rows, silu_t, nothing)

  end = Sub (length, one)
  count = Slice (numbers, end, length, one)
  begin = Sub (count, kept)
  kept_0d = Squeeze (kept, zero)
  each = Range (zero_0d, kept_0d, one_0d)
  last_numbers = Add (begin, each)
  last_places = GatherElements <axis = 1> (row_of, last_numbers)
  last_at = Add (last_places, begins)
  present_state = Gather <axis = 0> (flat, last_at)
}
"""

function = partial(OP.function, BODY)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, past_state: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the op in torch, in float64 if x is float64: (y in x's dtype, present_state).

    real: bool [B, S], the tokens that are not padding; None: all. Gradients pass.
    """
    import torch
    import torch.nn.functional as F

    wide, steps, kept = torch.promote_types(x.dtype, torch.float32), x.shape[1], len(weight) - 1
    rows = torch.cat([past_state.to(wide), x.to(wide)], 1)  # [B, K-1+S, C]
    if real is not None:  # moves the tokens that count to the front, in their order
        counted = F.pad(real, (kept, 0), value=True)
        order = counted.logical_not().int().argsort(dim=1, stable=True)
        rows = rows.take_along_dim(order[..., None], 1)
    sums = bias.to(wide)
    for k, factor in enumerate(weight.to(wide)):
        sums = sums + factor * rows[:, k : k + steps]
    y = F.silu(sums).to(x.dtype)
    if real is None:
        return y, rows[:, steps:]
    number = real.cumsum(1)[..., None]
    y = torch.where(real[..., None], y.take_along_dim((number - 1).clamp(min=0), 1), 0)
    last = real.sum(1)[:, None, None] + torch.arange(kept, device=x.device)[:, None]
    return y, rows.take_along_dim(last, 1)
