"""diffbit's own family, which can represent every model: config.json is the ModelConfig, layer by layer, and tensors
have canonical names and order. Models that no other family can represent are written in it, so a new variant, MLP or
mixer needs no family of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ._family import Family

LAST = 1 << 16
OTHERS = ("model_type", "torch_dtype", "dtype", "transformers_version", "quantization_config")  # beside the ModelConfig


class Diffbit(Family):
    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig.from_dict({name: value for name, value in values.items() if name not in OTHERS})

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"model_type": self.model_type} | config.to_dict()


FAMILIES = (Diffbit("diffbit", writes=LAST),)
