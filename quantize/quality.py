"""How close a quantized model is to its float model, on text that it was not calibrated on.

    KL      mean over tokens of sum_v p(v) (log p(v) - log q(v)), in nats; p the float model, q the quantized one
    share   of the tokens at which both models' most likely next token is the same

Linear layers round their inputs as the artifact's operators do. Memory: both models in fp32, and the float model's
log-probabilities of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..models import Decoder, ModelConfig, num_parameters
from .calibration import Tokens
from .calibration.predictions import predictions
from .layer import as_exported


@dataclass(frozen=True)
class Quality:
    """KL in nats per token, and the share of the same most likely tokens, over so many tokens."""

    kl: float
    same_tokens: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.same_tokens:.0%} of the most likely tokens are those of the float model, KL {self.kl:.3f} nats per "
            f"token ({self.tokens:,} tokens)"
        )


def quality_demand(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of memory that both models and `quality` take for so many tokens."""
    return 4 * (2 * num_parameters(config) + tokens * (config.vocab_size + 8 * config.hidden_size)) + (64 << 20)


@torch.no_grad()
def quality(float_model: Decoder, quantized: Decoder, ids: Any, mask: Any = None) -> Quality:
    """Compare two models on token ids [n, S]; mask: bool [n, S], the tokens that count (None: all).

    The linear layers of `quantized` round their inputs from now on.
    """
    as_exported(quantized)
    kl = same = 0.0
    text = Tokens(float_model.config, ids, mask)
    exact = list(predictions(float_model, text))
    for p, q in zip(exact, predictions(quantized, text), strict=True):
        kl += (p.exp() * (p - q)).sum(dtype=torch.float64).item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
    return Quality(kl / text.count, same / text.count, text.count)
