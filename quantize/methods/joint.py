"""Rounds queries, keys and values jointly, by their effect on attention's output: a head's rows, both branches.

Differential attention subtracts, out = O norm((A1 - lambda A2) v), so rounding errors of both branches' queries add up
in a token's output (to first order; R_t rotary embedding, Cov over the keys that row t of A_b attends to, N_t the head
norm's Jacobian, O the columns of o_proj that read the head):

    d out_t = J1_t dW1 x_t - lambda J2_t dW2 x_t,       J_b,t = O N_t Cov_b,t(v, k_b) R_t / sqrt d

For the rows W = [W1; W2] of a pair, the squared norm of this is a quadratic form, approximated here by averaging its
two factors separately (K-FAC, arXiv 1503.05671; signs and lambda are in J = [J1, -lambda J2]):

    mean_t ||d out_t||^2  ~  tr(dW^T M dW G),           M = mean_t J_t^T J_t [R, R],   G = mean_t x_t x_t^T [K, K]

GPTQ uses only G: all rows count equally and none compensates for another. With M, this is the nearest-plane algorithm
on a Kronecker lattice (arXiv 2505.22988): columns as in GPTQ, and within a column the rows of a pair one after the
other, each moved by the errors of those before it,

    w_i + sum_{h<i} (w_h - q_h) S_hi / S_ii,            M = S S^T,  S upper triangular, rows by decreasing M_ii

so the noise branch compensates for the signal branch, and a head's dimensions for each other. All later tokens read a
key and a value; the M of keys and values is the mean of their J^T J, summed over these tokens. GPTQ's refinement (first
scales, then columns) also runs here, under tr(dW^T M dW G).

J is never formed. Random signs r_t on the output give gradients g = J^T r at the projection, and the mean of g g^T is
M: one backward pass through the attention, whatever its variant. The variant's `joint_rows` says which neighbouring
rows belong to one head. Everything else in the layer is rounded by GPTQ.

It helps if only q and k are quantized, to 2 or 3 bits: over six training runs of DIFF version 2 it loses about half as
much as GPTQ; in version 1 and a plain Transformer the gain is not established (docs/accuracy.md). With all weights
quantized it gains little.

Memory in addition to GPTQ's: the autograd graph of one batch of tokens through the attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import DiffbitError
from .. import scales
from ..formats import Format, QTensor
from ..layer import Layer
from ..model import Method
from ..stages import round_stages
from ..stats import CalibStats
from . import gptq

CALIBRATED = True
SEED = 0  # of the random signs
DAMPING = 0.1  # of M; more than GPTQ's of G, because M is an estimate


def quantize_layer(layer: Layer) -> dict[str, QTensor]:
    if layer.tokens is None:
        raise DiffbitError("joint needs calibration tokens; pass a text, such as --calibrate mix")
    layer.expect(len(layer.tokens.slices) * len(layer.formats))
    metrics = row_metrics(layer) if layer.is_layer else {}

    def method(name: str) -> Method:
        return partial(quantize_rows, metric=metrics[name]) if name in metrics else gptq.quantize

    return round_stages(layer, method, whole=metrics)


def quantize_rows(weight: Tensor, format: Format, stats: CalibStats, metric: Tensor) -> QTensor:
    """Round a weight [N, K] by GPTQ with a metric [N/R, R, R] for its N/R blocks of R rows."""
    weight, gram = weight.float(), stats.gram
    mean = metric.diagonal(dim1=1, dim2=2).mean(1)
    added = torch.where(mean > 0, DAMPING * mean, 1.0)  # 1 for an unused head, which gives plain GPTQ for its rows
    metric = metric + added[:, None, None] * torch.eye(metric.shape[1], device=metric.device)
    weights = metric.diagonal(dim1=1, dim2=2)  # [B, R]
    encode = row_by_row(format, metric)

    def made(codes: Tensor, scale: Tensor) -> QTensor:
        return QTensor(format, (weight.shape[0], weight.shape[1]), codes, scale, zero)

    def pulled(rounded: QTensor) -> tuple[Tensor, Tensor]:
        """Return the rounding error [B, R, K], and M times the error."""
        lost = (weight - rounded.dequantize()).unflatten(0, metric.shape[:2])
        return lost, metric @ lost

    def losses(rounded: QTensor) -> Tensor:
        """Return tr(dW^T M dW G) of each block, or of all blocks if they share a scale."""
        lost, pull = pulled(rounded)
        each = ((lost @ gram) * pull).sum((1, 2))
        return each.sum(0, keepdim=True) if rounded.scale.shape[0] == 1 else each

    feedback = gptq.Feedback.of(gram)
    scale, zero = scales.search(weight, format, feedback.cost)
    best = made(gptq.round_columns(weight, format, scale, zero, feedback, encode), scale)
    loss = losses(best)
    for _ in range(gptq.ROUNDS):
        # solves each row's scales with the other rows of its block fixed
        lost, pull = pulled(best)
        wanted = weight + (pull / weights[..., None] - lost).flatten(0, 1)
        scale = scales.solve(wanted, format, best.codes, best.scale, zero, gram, gptq.damping(gram))
        now = made(gptq.descend(weight, format, best.codes, scale, zero, gram, encode), scale)
        found = losses(now)
        better = found <= loss  # nearest-plane rounding is not optimal, so a block may get worse
        loss = torch.where(better, found, loss)
        rows = better.repeat_interleave(len(weight) // len(better))[:, None]
        best = made(
            torch.where(rows, now.codes, best.codes),
            torch.where(rows if len(scale) == len(weight) else better[:, None], now.scale, best.scale),
        )
    return best


def row_by_row(format: Format, metric: Tensor) -> gptq.Encode:
    """Return a function that rounds a column [N] under metrics [B, R, R] of its B = N/R blocks of rows, all at once."""
    blocks, rows, _ = metric.shape
    each = [gptq.Feedback.of(one) for one in metric]
    order = torch.stack([one.order for one in each])  # [B, R]
    factor = torch.stack([one.factor for one in each], -1)  # [R, R, B]
    starts = rows * torch.arange(blocks, device=metric.device)[:, None]
    place = (order + starts).T  # [R, B]: index of the i-th row of each block

    def encode(column: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        wanted, scale = column[place], scale[place]
        zero = None if zero is None else zero[place]
        moved = wanted.clone()
        codes = torch.empty(place.shape, dtype=torch.uint8, device=column.device)
        for i in range(rows):
            z = None if zero is None else zero[i]
            codes[i] = format.encode_each(moved[i], scale[i], z).to(torch.uint8)
            lost = wanted[i] - format.decode_each(codes[i], scale[i], z)
            moved[i + 1 :] += factor[i, i + 1 :] * lost
        result = torch.empty(len(column), dtype=torch.uint8, device=column.device)
        result[place] = codes
        return result

    return encode


def row_metrics(layer: Layer) -> dict[str, Tensor]:
    """Return {module: M, fp32 [B, R, R]} of this layer's projections that are quantized and have `joint_rows`."""
    tokens = layer.tokens
    assert tokens is not None
    module: Any = layer.module().requires_grad_(False)
    attention = module.self_attn
    widths = {
        name: rows
        for projection, rows in layer.spec.mixer.joint_rows().items()
        if (name := f"{layer.prefix}self_attn.{projection}") in layer.formats
    }
    outputs: dict[str, Tensor] = {}
    for name in widths:

        def keep(_: object, __: object, output: Tensor, name: str = name) -> Tensor:
            outputs[name] = output.detach().requires_grad_()  # a leaf, where the autograd graph begins
            return outputs[name]

        attention.get_submodule(name.rpartition(".")[2]).register_forward_hook(keep)
    totals: dict[str, Tensor] = {}
    if not widths:
        return totals
    layer.expect(len(tokens.slices))
    generator = torch.Generator().manual_seed(SEED)
    size = *tokens.ids.shape[1:], layer.config.hidden_size
    signed = (
        (rows, torch.randint(0, 2, (len(tokens.ids[rows]), *size), generator=generator)) for rows in tokens.slices
    )

    def squares(of: tuple[slice, Tensor]) -> list[Tensor]:
        """Return sum_t g_t g_t^T [B, R, R] over the tokens of a batch, for each projection."""
        batch = tokens.batch(of[0])
        with torch.enable_grad():
            normed = module.input_layernorm(batch.hidden)
            out = attention(normed, batch.rope, batch.mask, None, batch.carried)  # [n, S, E]
            signs = of[1].mul(2).sub(1).to(out)
            leaves = [outputs[name] for name in widths]
            found = torch.autograd.grad(out, leaves, signs * batch.counted[..., None])
        layer.step(f"{layer.prefix}self_attn", tokens.here.count)
        pairs = zip(widths.values(), found, strict=True)
        blocks = [gradient[batch.counted].unflatten(-1, (-1, width)) for width, gradient in pairs]
        return [torch.einsum("tbi,tbj->bij", block, block) for block in blocks]  # [T, B, R]

    for batch in tokens.here.share(signed, squares):
        for name, square in zip(widths, batch, strict=True):
            totals[name] = totals[name] + square if name in totals else square
    return {name: total / tokens.count for name, total in totals.items()}
