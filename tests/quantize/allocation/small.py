"""A small model whose layers matter more or less, and the divergence of two models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffbit.models import Decoder, ModelConfig

CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=96,
    attention="diff_v1",
)  # fmt: skip
IDS = torch.randint(96, (5, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(24) < torch.tensor([24, 24, 17, 24, 9])[:, None]


def make(config: ModelConfig = CONFIG) -> Decoder:
    """A random model some of whose layers matter more than others."""
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for place, (name, parameter) in enumerate(decoder.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.mul_(2 + place % 4)
    return decoder


def divergence(exact: Decoder, other: Decoder, ids: Tensor = IDS, mask: Tensor = MASK) -> float:
    """KL by its definition, both models run whole in float64's neighbourhood: the slow and obvious version."""
    with torch.no_grad():
        p, q = (F.log_softmax(model(ids, attention_mask=mask.long()).double(), dim=-1) for model in (exact, other))
    return float((p.exp() * (p - q)).sum(-1)[mask].mean())
