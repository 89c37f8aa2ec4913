"""Models of equal layers with some of their sizes changed."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from diffbit.models import ModelConfig


def resized(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The uniform model with other arguments of `ModelConfig.uniform`."""
    layer = config.layers[0]
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "layers"}
    sizes = {name: getattr(layer.mixer, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    values |= {"num_layers": config.num_layers, **sizes, **asdict(layer.mlp), "sub_norms": layer.sub_norms}
    values |= {"attention": layer.mixer.name, "mlp": layer.mlp.name}
    return ModelConfig.uniform(**(values | changes))
