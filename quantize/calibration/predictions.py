"""What models predict for a text, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models import Decoder
from .gradients import forward
from .tokens import Tokens

CHUNK = 1 << 23  # logits computed at a time


def divergence(exact: Iterable[Tensor], other: Iterable[Tensor], text: Tokens) -> float:
    """Return KL(exact || other), nats per token, of two models' `predictions` of a text."""
    pairs = zip(exact, other, strict=True)
    return sum((p.exp() * (p - q)).sum(dtype=torch.float64).item() for p, q in pairs) / text.count


@torch.no_grad()
def predictions(decoder: Decoder, text: Tokens, layers: Iterable[nn.Module] | None = None) -> Iterator[Tensor]:
    """Yield log-probabilities fp32 [t, V] of the tokens that count, some tokens at a time.

    layers: run the text's hidden states through these and the head of `decoder`; None: run the whole `decoder`.
    """
    if layers is None:
        text.embed(decoder.embed)
        layers = list(decoder.model.layers)
    for batch in text.batches():
        states = forward(layers, batch)[batch.counted]  # [T, E]
        for rows in states.split(max(1, CHUNK // decoder.config.vocab_size)):
            yield F.log_softmax(decoder.head(rows).float(), dim=-1)
