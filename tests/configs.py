"""Models of equal layers with some of their sizes changed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from diffbit.models import ModelConfig

BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def resized(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The uniform model with other arguments of `ModelConfig.uniform`."""
    layer = config.layers[0]
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "layers"}
    sizes = {name: getattr(layer.mixer, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    values |= {"num_layers": config.num_layers, **sizes, "intermediate_size": layer.mlp.intermediate_size}
    values |= {"attention": layer.mixer.name, "mlp": layer.mlp.name, "sub_norms": layer.sub_norms}
    values |= {"qkv_bias": layer.mixer.qkv_bias, "o_bias": layer.mixer.o_bias, "mlp_bias": layer.mlp.bias}
    values |= {"qk_norm_eps": layer.mixer.qk_norm_eps}
    return ModelConfig.uniform(**(values | changes))
