"""Hugging Face's smollm3 (SmolLM3): a llama in which some layers have no positions; read only.

no_rope_layers has a 1 for each layer with RoPE and a 0 for each without; by default every no_rope_layer_interval-th is
without. With use_sliding_window, those without, or those of layer_types, have a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...io.errors import DiffbitError
from ...io.fields import Count, get, shown
from ..config import LayerSpec
from ._family import ROPE
from ._huggingface import FULL, SLIDING, HuggingFace, changed, layer_types, windowed

DEFAULTS = {
    "rms_norm_eps": 1e-6, "rope_theta": 2000000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "num_key_value_heads": 4,
}  # fmt: skip


class SmolLM3(HuggingFace):
    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        rotated = _rotated(values)
        window = values.get("sliding_window") if get(values, "use_sliding_window", bool, False) else None
        types = layer_types(values, tuple(FULL if rope or window is None else SLIDING for rope in rotated))
        if window is None and SLIDING in types:
            raise DiffbitError(f"layer_types has {SLIDING}, but use_sliding_window or sliding_window is not set")
        layer = changed(super().layer(values, index), rope=bool(rotated[index]))
        return windowed(layer, values, window if types[index] == SLIDING else None)


def _rotated(values: Mapping[str, Any]) -> Sequence[int]:
    """Return a 1 for each layer with RoPE, and a 0 for each without."""
    count, interval = values["num_hidden_layers"], get(values, "no_rope_layer_interval", Count, 4)
    default = tuple(int((index + 1) % interval != 0) for index in range(count))
    rotated: tuple[int, ...] = get(values, "no_rope_layers", tuple[int, ...], default)
    if len(rotated) < count:
        raise DiffbitError(f"no_rope_layers is {shown(list(rotated))}, wanted {count} entries: one a layer")
    return rotated[:count]


FAMILIES = (
    SmolLM3(
        "smollm3",
        "softmax",
        architecture="SmolLM3ForCausalLM",
        defaults=DEFAULTS,
        biases=("attention_bias", "mlp_bias"),
        reads=ROPE
        | {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"},
    ),
)
