"""Hugging Face's qwen2 (Qwen 2 and 2.5): a llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...io.fields import get
from ._huggingface import WINDOW, HuggingFace


def windows(values: Mapping[str, Any]) -> Sequence[Any]:
    """If use_sliding_window is set, the layers from max_window_layers on have a window."""
    layers, first = range(values["num_hidden_layers"]), get(values, "max_window_layers", int, 28)
    window = values.get("sliding_window", WINDOW) if get(values, "use_sliding_window", bool, False) else None
    types = get(values, "layer_types", tuple[str, ...], ())
    if len(types) != len(layers):
        types = ["sliding_attention" if index >= first else "full_attention" for index in layers]
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
