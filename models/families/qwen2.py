"""Hugging Face's qwen2 (Qwen 2 and 2.5): a llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._huggingface import WINDOW, HuggingFace


def window(values: Mapping[str, Any]) -> Any:
    """Where use_sliding_window asks for one, the layers from max_window_layers on have it."""
    types, first = values.get("layer_types"), values.get("max_window_layers", 28)
    if isinstance(types, list):
        none = "sliding_attention" not in types
    else:
        none = isinstance(first, int) and first >= values["num_hidden_layers"]
    return None if none or not values.get("use_sliding_window") else values.get("sliding_window", WINDOW)


FAMILIES = (
    HuggingFace(
        "qwen2",
        "softmax",
        architecture="Qwen2ForCausalLM",
        norm_eps=1e-6,
        max_position=32768,
        biases=(),
        qkv_bias=True,
        window=window,
    ),
)
