"""diffbit's own family, which holds every model: config.json is the ModelConfig as it is, layer by layer, and tensors
lie under canonical names in canonical order. What no other family can hold is written so; a new variant, MLP or mixer
needs no family of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family

OTHERS = ("model_type", "torch_dtype", "dtype", "transformers_version", "quantization_config")  # beside the ModelConfig


class Diffbit(Family):
    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig.from_dict({name: value for name, value in values.items() if name not in OTHERS})

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"model_type": self.model_type} | config.to_dict()


FAMILIES = (Diffbit("diffbit"),)
