"""Distillation: a frozen teacher's word on every token, beside the text's own (BitDistill, arXiv 2510.13998).

    loss = CE + alpha L_logits + gamma L_relations                                                        (eq. 13)

    L_logits       mean over tokens of KL(teacher || student) of softmax(logits / 5); no factor 25        (eq. 8-9)
    L_relations    of one layer's q_proj, k_proj and v_proj, summed over the three: mean over relation heads and tokens
                   of KL(teacher || student) of softmax(A A^T / sqrt(e))          (eq. 10-12; MiniLMv2, 2012.15828)

alpha is 100 by default, where the paper has 10 for tasks of few labels: at temperature 5 a gradient is a twenty-fifth
of what it is at 1, and 100 gives a teacher of a whole vocabulary four times the text's say. 60 steps of 8 rows of 128
tokens from examples/nano/softmax to ternary (learning rate 8e-4) end at 2.646 nats with 10 and at 2.523 with 100. gamma
is 0.1: at 1 (and alpha 10, rate 2e-3) the same steps end at 2.766, without relations at 2.754.

A [S, e] is a relation head's share of a projection's output, before any rotation: the output is cut into relation
heads of equal width, as many for student and teacher, so that neither their attention variants nor their sizes have
to agree. What they must share is the vocabulary.

Both losses are sums of a divergence whose gradient is known in closed form, and are computed with it in blocks: of a
second [B, S, V] only the teacher's logits and the gradient are held, of a [S, S] relation only a block's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..calib_data import TextTokenizer, load_tokenizer
from ..errors import DiffbitError
from ..models import Checkpoint, Decoder
from ..quantize import load
from .config import TrainConfig

TEMPERATURE = 5.0
RELATION_HEADS = 4
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
BLOCK = 1 << 20  # numbers of a divergence's input handled at a time: some MB, which stay in cache


class Teacher:
    """The model a student is held to: float or quantized, of any attention variant and size."""

    def __init__(self, config: TrainConfig, student: Decoder, tokenizer: TextTokenizer, device: torch.device) -> None:
        assert config.distill is not None
        checkpoint = Checkpoint(config.distill)
        _check(checkpoint, config, tokenizer)
        self.sha256 = checkpoint.sha256()
        self.model = load(checkpoint).to(device).eval().requires_grad_(False)
        self.related = config.relation_weight > 0
        self._seen: dict[tuple[Decoder, str], Tensor] = {}
        self._student = student
        if self.related:
            layers = student.config.num_layers
            index = default_layer(layers) if config.distill_layer is None else config.distill_layer
            self._listen(student, index)
            self._listen(self.model, max(0, (index + 1) * self.model.config.num_layers // layers - 1))

    def _listen(self, model: Decoder, index: int) -> None:
        """Keep what the projections of layer `index` put out in the latest forward pass."""

        def keep(module: nn.Module, inputs: Any, output: Tensor, name: str) -> None:
            if output.requires_grad or model is self.model:  # not of an evaluation
                self._seen[model, name] = output

        attention = model.model.layers[index].get_submodule("self_attn")
        for name in PROJECTIONS:
            attention.get_submodule(name).register_forward_hook(partial(keep, name=name))

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> [B, S, V]."""
        logits: Tensor = self.model(ids)
        return logits

    def losses(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Both losses, summed over the tokens of the student's and the teacher's latest forward pass, whose logits
        [B, S, V] are given; the second is 0 where relations have no weight."""
        first: Tensor = _Divergence.apply(logits, target)
        second = torch.zeros((), device=logits.device)
        if self.related:
            for name in PROJECTIONS:
                student, teacher = (self._seen.pop((model, name)) for model in (self._student, self.model))
                second = second + _Relations.apply(student, teacher)
        return first, second


def default_layer(layers: int) -> int:
    """The layer whose relations are compared, three quarters up: the paper finds late layers best, not the last."""
    return math.ceil(0.75 * layers) - 1


class _Divergence(torch.autograd.Function):
    """Sum over tokens of KL(teacher || student) at TEMPERATURE, of logits [B, S, V]."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        width = student.shape[-1]
        students, teachers = student.reshape(-1, width), teacher.reshape(-1, width)
        gradient = torch.empty_like(students)
        total = torch.zeros((), device=student.device)
        for rows in _blocks(len(students), width):
            loss, slope = divergence(students[rows].float() / TEMPERATURE, teachers[rows].float() / TEMPERATURE)
            total += loss
            gradient[rows] = slope.div_(TEMPERATURE)
        ctx.save_for_backward(gradient.view(student.shape))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grads[0]), None


class _Relations(torch.autograd.Function):
    """Sum over tokens, mean over relation heads, of KL(teacher || student) of softmax(A A^T / sqrt e).

    Of a projection's outputs, student's [B, S, E] and teacher's [B, S, F]. With g the divergence's gradient to the
    relations [S, S], the gradient to A is (g + g^T) A / sqrt e.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        batch, length, width = student.shape
        heads = math.gcd(RELATION_HEADS, width, teacher.shape[-1])
        gradient = torch.empty_like(student)
        total = torch.zeros((), device=student.device)
        for rows in _blocks(batch, heads * length * length):
            a, b = (x[rows].float().unflatten(-1, (heads, -1)).transpose(1, 2) for x in (student, teacher))
            a, b = a * a.shape[-1] ** -0.25, b * b.shape[-1] ** -0.25  # [b, heads, S, e]
            loss, slope = divergence(a @ a.mT, b @ b.mT)
            total += loss / heads
            moved = (slope + slope.mT) @ a * (a.shape[-1] ** -0.25 / heads)
            gradient[rows] = moved.transpose(1, 2).flatten(2).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grads[0]), None


def divergence(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Logits fp32 [..., V] -> sum of KL(softmax(teacher) || softmax(student)), and its gradient to the student's."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    wanted = theirs.exp()
    total = (wanted * theirs.sub_(ours)).sum()
    return total, ours.exp_().sub_(wanted)


def _blocks(count: int, width: int) -> list[slice]:
    step = max(1, BLOCK // width)
    return [slice(start, start + step) for start in range(0, count, step)]


def _check(checkpoint: Checkpoint, config: TrainConfig, tokenizer: TextTokenizer) -> None:
    """Refuse a teacher that speaks of other tokens, or of fewer at a time."""
    path, wanted = checkpoint.path, config.model
    if checkpoint.config.vocab_size != wanted.vocab_size:
        raise DiffbitError(
            f"{path}: its vocabulary has {checkpoint.config.vocab_size} ids and the student's {wanted.vocab_size}, "
            "but a teacher must have the student's; start the student with --tokenizer or --init from this folder"
        )
    theirs = load_tokenizer(path)
    if theirs.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise DiffbitError(
            f"{path}: its tokenizer gives other ids than the student's, but a teacher must read the student's tokens; "
            "start the student with --tokenizer or --init from this folder"
        )
    if checkpoint.config.max_position < config.length:
        raise DiffbitError(
            f"{path}: its context is {checkpoint.config.max_position} tokens and the rows have {config.length}; "
            "make them shorter (--context), or take a teacher of a longer context"
        )
