"""Hugging Face's qwen2 (Qwen 2 and 2.5): a llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...io.errors import DiffbitError
from ...io.fields import get
from ..config import LayerSpec
from ._family import ROPE
from ._huggingface import FULL, SLIDING, WINDOW, HuggingFace, changed, layer_types, windowed

READS = ROPE | {"use_sliding_window", "sliding_window", "layer_types"}


class WithWindows(HuggingFace):
    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        """If use_sliding_window is set, the layers from max_window_layers on have a window."""
        layers, first = range(values["num_hidden_layers"]), get(values, "max_window_layers", int, 28)
        window = values.get("sliding_window", WINDOW) if get(values, "use_sliding_window", bool, False) else None
        default = tuple(SLIDING if index >= first and window is not None else FULL for index in layers)
        types = layer_types(values, default)
        if window is None and SLIDING in types:
            raise DiffbitError(f"layer_types has {SLIDING}, but use_sliding_window or sliding_window is not set")
        return windowed(super().layer(values, index), values, window if types[index] == SLIDING else None)


class Qwen2(WithWindows):
    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        return changed(super().layer(values, index), qkv_bias=True)


FAMILIES = (
    Qwen2(
        "qwen2",
        "softmax",
        architecture="Qwen2ForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
        biases=(),
        writes=1,
        reads=READS,
    ),
)
