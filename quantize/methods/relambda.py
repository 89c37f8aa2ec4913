"""lambda fitted again after rounding, in closed form: it stays float and costs no bit.

Rounding, of weights or of the attention itself (low-bit keys, values, products, logits), changes both branches of
differential attention, S_th and O_th at token t and head h (A1 v and A2 v), and the lambda that was right for the float
ones need not be right for them. With D_th = S - lambda O of the float model on its own, exact inputs, what the rounded
layer should subtract with is the least-squares answer at each token and head,

    lambda*_th = <S_th - D_th, O_th> / <O_th, O_th>       of weight  w_th = <O_th, O_th> / (mean D_th^2 + eps)

(the weight without its divisor where no head norm follows), and the sum over tokens and heads of
w_th (lambda - lambda*_th)^2 is the error of the difference as a function of lambda alone. Version 1 has one lambda a
layer: its minimum is the weighted mean, and lambda_q1 moves along lambda_k1 just so far (checkpoints and artifacts know
the four vectors only). Version 2 has a sigmoid(W x) per token and head: a ridge step of W on the linearised sigmoid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import DiffbitError
from ..cache import is_low_bit
from ..piece import Piece
from ..qtensor import QTensor

CALIBRATED = True


@torch.no_grad()
def refit(piece: Piece, quantized: Mapping[str, QTensor]) -> None:
    rounds = any(name.startswith(f"{piece.prefix}self_attn.") for name in quantized)
    if not piece.is_layer or not (rounds or is_low_bit(piece.scheme.attention)):
        return
    if piece.tokens is None:
        raise DiffbitError("relambda needs calibration tokens; name a text to take them from (--calibrate stdlib)")
    true: Any = piece.module()
    rounded: Any = piece.module(quantized)
    attention = rounded.self_attn
    if not hasattr(attention, "refit_lambda"):
        raise DiffbitError(
            f"relambda has nothing to refit: {piece.config.attention} attention subtracts nothing; leave it out"
        )
    if touched := [name for name in quantized if "lambda" in name]:
        raise DiffbitError(f"relambda refits {touched[0]}, which the scheme quantizes; keep it float (NAME=none)")
    inputs, targets, weights = [], [], []
    for batch in piece.tokens.batches():
        exact = true.input_layernorm(batch.exact)
        signal, noise = true.self_attn.branches(exact, batch.rope, batch.mask, None)
        difference = signal - true.self_attn.lambda_of(exact) * noise  # [n, H, S, e]
        x = rounded.input_layernorm(batch.hidden)
        signal, noise = attention.branches(x, batch.rope, batch.mask, None)
        square = noise.square().sum(-1)  # [n, H, S]
        wanted = ((signal - difference) * noise).sum(-1) / square.clamp(min=1e-30)
        if hasattr(attention, "norm_eps"):
            square = square / (difference.square().mean(-1) + attention.norm_eps)
        inputs.append(x[batch.counted])
        targets.append(wanted.transpose(1, 2)[batch.counted])
        weights.append(square.transpose(1, 2)[batch.counted])
    attention.refit_lambda(torch.cat(inputs), torch.cat(targets), torch.cat(weights))
    for name, parameter in attention.named_parameters():
        if "lambda" in name:
            piece.refitted[f"{piece.prefix}self_attn.{name}"] = parameter.detach()
