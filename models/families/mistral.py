"""Hugging Face's mistral: a llama whose attention has a sliding window, unless that is null or as long as the context.

With `layer_types` some layers have it and others do not: transformers then reads the folder as a ministral. Without a
window it is written as a llama, with one in diffbit's own family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...io.errors import DiffbitError
from ..config import LayerSpec
from ._family import ROPE
from ._huggingface import FULL, SLIDING, WINDOW, HuggingFace, layer_types, windowed


class Mistral(HuggingFace):
    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        window = values.get("sliding_window", WINDOW)
        types = layer_types(values, (FULL if window is None else SLIDING,) * values["num_hidden_layers"])
        if window is None and SLIDING in types:
            raise DiffbitError(f"layer_types has {SLIDING}, but sliding_window is not set")
        return windowed(super().layer(values, index), values, window if types[index] == SLIDING else None)


FAMILIES = (
    Mistral(
        "mistral",
        "softmax",
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 131072},
        biases=(),
        reads=ROPE | {"sliding_window", "layer_types"},
    ),
)
