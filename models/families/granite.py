"""IBM's granite (granite 3, dense): a llama whose config.json has four factors, which fold into weights, read only.

embedding_multiplier m   of the embedding's output
attention_multiplier a   in the place of 1 / sqrt d: queries times a sqrt d
residual_multiplier r    of what a mixer or an MLP adds: o_proj and down_proj times r
logits_scaling s         divides the logits: the head divided by s; a tied one is the embedding, times m, so that the
                         final norm is divided by m s, the config's hidden_scale
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...io.fields import Positive, get
from ..config import ModelConfig
from ._family import ROPE, Stored
from ._huggingface import HuggingFace, attention_of


@dataclass(frozen=True)
class Granite(HuggingFace):
    quantized = False
    embedding: float = 1.0
    attention_factor: float = 1.0
    residual: float = 1.0
    logits: float = 1.0

    def opened(self, values: Mapping[str, Any], names: Collection[str]) -> Granite:
        return replace(
            self,
            embedding=get(values, "embedding_multiplier", Positive, 1.0),
            attention_factor=get(values, "attention_multiplier", Positive, 1.0),
            residual=get(values, "residual_multiplier", Positive, 1.0),
            logits=get(values, "logits_scaling", Positive, 1.0),
        )

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        config, read = super().read(values), self.opened(values, ())
        return replace(config, hidden_scale=read.embedding * read.logits) if config.tie_embeddings else config

    def stored(self, config: ModelConfig, name: str) -> Stored:
        return replace(super().stored(config, name), times=self._factor(config, name))

    def _factor(self, config: ModelConfig, name: str) -> float:
        match name.split(".")[-2]:
            case "embed_tokens":
                return self.embedding
            case "q_proj":
                return self.attention_factor * math.sqrt(attention_of(config, name).head_dim)
            case "o_proj" | "down_proj":
                return self.residual
            case "norm" if config.tie_embeddings:
                return 1 / (self.embedding * self.logits)
            case "lm_head":
                return 1 / self.logits
        return 1.0


FAMILIES = (
    Granite(
        "granite",
        "softmax",
        architecture="GraniteForCausalLM",
        defaults={"rms_norm_eps": 1e-6},
        biases=("attention_bias", "mlp_bias"),
        reads=ROPE | {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"},
    ),
)
