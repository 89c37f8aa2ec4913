"""The loss of a batch, in pieces of its tokens, so that no tensor is as large as tokens times vocabulary.

    loss = sum_t w_t CE_t + alpha sum_t KL_t         KL_t = KL(teacher || student) of softmax(logits / 5)

CE is the cross entropy of the next tokens, w their weights, both sums over the batch. KL is the loss of BitDistill
(arXiv 2510.13998, eq. 8, 9 and 13; distill.py). For each piece of tokens the forward pass computes the logits of both
models, the loss, and at once the gradients of the hidden states and of the head's weights; the backward pass only
multiplies those by the gradient that comes from above (as Liger Kernel does, arXiv 2410.10989, section 3.2), so the
head is computed once. With z the student's logits and t the teacher's,

    dloss/dz = w (softmax(z) - onehot) + alpha (softmax(z / 5) - softmax(t / 5)) / 5
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...models import Decoder
from .distill import TEMPERATURE, Teacher

PIECE = 1 << 24  # logits of a piece: 64 MiB in fp32
BLOCK = 1 << 20  # logits that softmaxes are computed of together on a CPU: a few MB, which stay in cache


class Objective(nn.Module):
    """A model with its loss: one module, as DistributedDataParallel needs it.

    forward(ids [B, S + 1], weights [B, S] of the tokens to predict) -> the loss above; CE of each token [B, S] and the
    sum of KL, both without gradients.
    """

    def __init__(
        self, model: Decoder, teacher: Teacher | None = None, alpha: float = 0.0, compiled: bool = False
    ) -> None:
        super().__init__()
        self.model, self.teacher, self.alpha = model, teacher, alpha
        self.hidden: Callable[[Tensor], Tensor] = torch.compile(model.hidden) if compiled else model.hidden

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, targets = ids[:, :-1], ids[:, 1:]
        hidden = self.hidden(tokens)
        theirs = None if self.teacher is None else self.teacher.hidden(tokens).flatten(0, 1)
        table = self.model.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        trained = [
            parameter
            for part in (self.model.model.norm, table)
            for parameter in part.parameters()
            if parameter.requires_grad and torch.is_grad_enabled()  # needs_input_grad does not know the latter
        ]
        loss, losses, divergence = _InPieces.apply(
            self, hidden.flatten(0, 1), targets.flatten(), weights.flatten(), theirs, *trained
        )
        return loss, losses.view(targets.shape), divergence


class _InPieces(torch.autograd.Function):
    """Objective, hidden [T, E], targets and weights [T], the teacher's hidden [T, E'], what the head trains -> loss,
    CE [T] and the sum of KL."""

    @staticmethod
    def forward(
        ctx: Any, objective: Objective, hidden: Tensor, targets: Tensor, weights: Tensor, theirs: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        losses, divergence = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
        trains = any(ctx.needs_input_grad)
        sums: list[Tensor] = []
        to_hidden = torch.empty_like(hidden) if trains else hidden
        size = max(1, PIECE // objective.model.config.vocab_size)
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            rows = hidden[piece].detach().requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                logits = objective.model.head(rows)
            target = None if theirs is None or objective.teacher is None else objective.teacher.head(theirs[piece])
            losses[piece], divergence[piece], gradient = _of_logits(
                logits.detach(), targets[piece], weights[piece], target, objective.alpha
            )
            if trains:
                to_hidden[piece], *added = torch.autograd.grad(logits, (rows, *parameters), gradient)
                sums = [total.add_(one) for total, one in zip(sums, added, strict=True)] if sums else added
            del logits, target, gradient  # before the next piece's are allocated
        total = divergence.sum()
        ctx.save_for_backward(to_hidden, *sums)
        ctx.mark_non_differentiable(losses, total)
        return (losses * weights).sum() + objective.alpha * total, losses, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, *sums = (tensor.mul_(grads[0]) for tensor in ctx.saved_tensors)
        return None, to_hidden, None, None, None, *sums


def _of_logits(
    logits: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor | None, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """CE [n] and KL [n] of logits [n, V], and the gradient of weights * CE + alpha * KL, in logits' type [n, V]."""
    losses, divergence = torch.empty(2, len(logits), device=logits.device)
    gradient = torch.empty_like(logits)
    block = max(1, BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), block):
        rows = slice(start, start + block)
        z, index = logits[rows].float(), targets[rows, None]
        slope, total = _softmax(z)
        losses[rows] = (total - z.gather(1, index))[:, 0]
        slope.scatter_add_(1, index, torch.full_like(total, -1.0)).mul_(weights[rows, None])
        divergence[rows] = 0
        if teacher is not None:
            z, t = z / TEMPERATURE, teacher[rows].float() / TEMPERATURE
            ours, our_total = _softmax(z)
            theirs, their_total = _softmax(t)
            slope.add_(ours.sub_(theirs), alpha=alpha / TEMPERATURE)
            divergence[rows] = (theirs.mul_(t.sub_(z).add_(our_total - their_total))).sum(1)
        gradient[rows] = slope
    return losses, divergence, gradient


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and the logarithm of its denominator [n, 1], with one exponential per number."""
    top = logits.amax(1, keepdim=True)
    shares = (logits - top).exp_()
    total = shares.sum(1, keepdim=True)
    return shares.div_(total), total.log_().add_(top)  # div_ reads total before log_ changes it
