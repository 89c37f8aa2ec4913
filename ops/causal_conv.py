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
from .body import Nodes, Value
from .signature import Type

if TYPE_CHECKING:
    from torch import Tensor

OP = schema.CAUSAL_CONV


def body(op: Nodes) -> tuple[Value, Value]:
    x, weight, bias, attention_mask, past_state = op.inputs
    batch, steps, width, total = x.size(0), x.size(1), weight.size(0), attention_mask.size(1)
    state_rows, zero, one = width - 1, op.scalar(0), op.scalar(1)
    length = state_rows + steps

    def count(n: Value) -> Value:  # 0 .. n - 1
        return op("Range", zero, n.squeeze(0), one)

    flat = op("Concat", past_state, x.cast(Type.FLOAT32), axis=1).view(batch * length, x.size(2))
    begins = count(batch).unsqueeze(1) * length

    # [B, K-1+S]: 1 where a row counts; its number among these, from 1; and the other way round, the row of each number
    real = attention_mask.slice(total - steps, total, 1)
    counted = op("Concat", op.ints(1).expand(batch, state_rows), real, axis=1)
    numbers, shape = op("CumSum", counted, one), op("Shape", counted)
    places = length.expand(shape), numbers - 1, count(length).expand(shape)
    row_of = op("ScatterElements", *places, axis=1, reduction="min")

    def rows(number: Value) -> Value:
        return op("Gather", flat, op("GatherElements", row_of, number, axis=1) + begins, axis=0)

    oldest = numbers.slice(state_rows, length, 1) - width

    def tap(k: Value, sums: Value) -> Value:
        return sums + rows(op("Max", oldest + k, 0)) * op("Gather", weight, k, axis=0)

    sums = op.loop(width.squeeze(0), bias.expand(op("Shape", x)), tap, "float[b, s, c]")
    silu, nothing = (sums * op("Sigmoid", sums)).like(x), op("Constant", value_float=0.0).like(x)
    y = op("Where", real.cast(Type.BOOL).unsqueeze(2), silu, nothing)
    return y, rows(numbers.slice(length - 1, length, 1) - state_rows + count(state_rows))


function = partial(OP.function, body)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, past_state: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the op in torch, in float64 if x is float64: (y in x's dtype, present_state).

    real: bool [B, S], the tokens that are not padding; None: all. Gradients pass.
    """
    import torch
    import torch.nn.functional as F

    wide, steps, state_rows = torch.promote_types(x.dtype, torch.float32), x.shape[1], len(weight) - 1
    rows = torch.cat([past_state.to(wide), x.to(wide)], 1)  # [B, K-1+S, C]
    if real is not None:  # moves the tokens that count to the front, in their order
        counted = F.pad(real, (state_rows, 0), value=True)
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
    last = real.sum(1)[:, None, None] + torch.arange(state_rows, device=x.device)[:, None]
    return y, rows.take_along_dim(last, 1)
