"""Hugging Face's qwen2 (Qwen 2 and 2.5): a llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._huggingface import WINDOW, HuggingFace


def windows(values: Mapping[str, Any]) -> Sequence[Any]:
    """If use_sliding_window is set, the layers from max_window_layers on have a window."""
    count, first = values["num_hidden_layers"], values.get("max_window_layers", 28)
    window = values.get("sliding_window", WINDOW) if values.get("use_sliding_window") else None
    types = values.get("layer_types")
    if not isinstance(types, list) or len(types) != count:
        slides = [isinstance(first, int) and index >= first for index in range(count)]
        types = ["sliding_attention" if each else "full_attention" for each in slides]
    return [window if kind == "sliding_attention" else None for kind in types]


FAMILIES = (
    HuggingFace(
        "qwen2",
        "softmax",
        architecture="Qwen2ForCausalLM",
        norm_eps=1e-6,
        max_position=32768,
        biases=(),
        qkv_bias=True,
        writes=1,
        windows=windows,
    ),
)
