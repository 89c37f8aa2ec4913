"""Hugging Face's qwen2 (Qwen 2 and 2.5): a llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...io.errors import DiffbitError
from ...io.fields import get
from ._family import ROPE
from ._huggingface import FULL, SLIDING, WINDOW, HuggingFace, layer_types

READS = ROPE | {"use_sliding_window", "sliding_window", "layer_types"}


def windows(values: Mapping[str, Any]) -> Sequence[Any]:
    """If use_sliding_window is set, the layers from max_window_layers on have a window."""
    layers, first = range(values["num_hidden_layers"]), get(values, "max_window_layers", int, 28)
    window = values.get("sliding_window", WINDOW) if get(values, "use_sliding_window", bool, False) else None
    default = tuple(SLIDING if index >= first and window is not None else FULL for index in layers)
    types = layer_types(values, default)
    if window is None and SLIDING in types:
        raise DiffbitError(f"layer_types has {SLIDING}, but use_sliding_window or sliding_window is not set")
    return [window if kind == SLIDING else None for kind in types]


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
        reads=READS,
    ),
)
