"""Microsoft's phi3 (Phi-3, Phi-4-mini): a llama with fused projections, whose heads may rotate in part; read only.

qkv_proj has the rows of queries, keys and values, gate_up_proj those of gate and up. partial_rotary_factor says how
much of a head rotates. longrope has two lists of factors, by the length of the text: diffbit computes the short one,
so that the context is original_max_position_embeddings, and no longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get, located, one_of
from ..config import LayerSpec, ModelConfig
from ..layers.rope import LongRope, partial
from ._family import ROPE, Stored
from ._huggingface import HuggingFace, attention_of, rope_settings, rope_theta, windowed

ORIGINAL = 4096


class Phi3(HuggingFace):
    quantized = False

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        place, rope = rope_settings(values)
        others = {name: value for name, value in values.items() if name not in ROPE}
        config = super().read({**others, "rope_theta": rope_theta(values, rope)})
        share = get(rope, "partial_rotary_factor", Positive, get(values, "partial_rotary_factor", Positive, 1.0))
        width = config.rope_width
        rotated = int(width * share)
        if rotated % 2 or not 0 < rotated <= width:
            raise DiffbitError(
                f"partial_rotary_factor is {share}: {rotated} of the {width} numbers of a head would rotate, wanted an "
                "even number"
            )
        original = get(values, "original_max_position_embeddings", Count, ORIGINAL)
        with located(place):
            kinds = Annotated[str, one_of("default", "longrope")]
            if get(rope, "rope_type" if "rope_type" in rope else "type", kinds, "default") != "default":
                return _long(config, rope, rotated // 2, original)
        scaling = None if rotated == width else LongRope((1.0,) * (rotated // 2))
        return replace(config, rope_scaling=scaling)

    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        return windowed(super().layer(values, index), values, values.get("sliding_window"))

    def stored(self, config: ModelConfig, name: str) -> Stored:
        *path, module, kind = name.split(".")
        if module in ("gate_proj", "up_proj"):
            size = config.layers[0].mlp.intermediate_size
            first = 0 if module == "gate_proj" else size
            return Stored((".".join((*path, "gate_up_proj", kind)),), first=first, of_rows=2 * size)
        if module not in ("q_proj", "k_proj", "v_proj"):
            return Stored((name,))
        mixer, scaling = attention_of(config, name), config.rope_scaling
        queries, keys = mixer.query_rows, mixer.cache_heads * mixer.head_dim
        heads, first = {
            "q_proj": (mixer.num_heads, 0),
            "k_proj": (mixer.cache_heads, queries),
            "v_proj": (0, queries + keys),
        }[module]
        pairs = len(scaling.short_factor) if isinstance(scaling, LongRope) else 0
        is_partial = heads and 0 < 2 * pairs < mixer.head_dim
        rows = partial(heads, mixer.head_dim, 2 * pairs) if is_partial else None
        return Stored((".".join((*path, "qkv_proj", kind)),), rows, first=first, of_rows=queries + 2 * keys)


def _long(config: ModelConfig, rope: Mapping[str, Any], pairs: int, original: int) -> ModelConfig:
    """Read longrope. The default attention_factor is sqrt(1 + ln factor / ln original)."""
    short, long = (get(rope, name, tuple[Positive, ...]) for name in ("short_factor", "long_factor"))
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != pairs:
            raise DiffbitError(f"{name} has {len(factors)} entries, wanted {pairs}: one for each pair that rotates")
    factor = get(rope, "factor", Positive, config.max_position / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    limit = original if original < config.max_position and short != long else None
    scaling = LongRope(short, get(rope, "attention_factor", Positive, default), limit)
    return replace(config, rope_scaling=scaling, max_position=limit or config.max_position)


FAMILIES = (
    Phi3(
        "phi3",
        "softmax",
        architecture="Phi3ForCausalLM",
        defaults={"max_position_embeddings": ORIGINAL},
        biases=(),
        reads=ROPE | {"sliding_window"},
    ),
)
