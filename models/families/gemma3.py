"""Google's gemma3_text (Gemma 3, arXiv 2503.19786): a llama with four norms a layer, GEGLU and two tables of RoPE's
angles; read only. Layers with a sliding window rotate by rope_local_base_freq. Factors fold into weights:

    a norm multiplies by 1 + w
    the embedding's output is multiplied by sqrt(hidden_size), of which a tied head knows nothing: the final norm is
    divided by it, and it is the config's hidden_scale
    attention's logits are scaled by query_pre_attn_scalar^-0.5 in the place of head_dim^-0.5: the norm of queries

gemma3, which also reads images, has its language model's fields and tensors elsewhere, and is not read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get, shown
from ..config import LayerSpec, ModelConfig, NumLayers
from ._family import ROPE, Stored
from ._huggingface import FULL, SLIDING, HuggingFace, attention_of, changed, layer_types, windowed

DEFAULTS = {
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 131072, "head_dim": 256,
    "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2304,
}  # fmt: skip
READS = ROPE | {
    "layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "query_pre_attn_scalar",
    "rope_local_base_freq",
}  # fmt: skip


@dataclass(frozen=True)
class Gemma3(HuggingFace):
    quantized = False
    query_scalar: float = 256.0

    def opened(self, values: Mapping[str, Any], names: Collection[str]) -> Gemma3:
        return replace(self, query_scalar=get(values, "query_pre_attn_scalar", Positive, self.query_scalar))

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        values = DEFAULTS | {name: value for name, value in values.items() if value is not None}
        values |= {"hidden_act": values.get("hidden_activation", "gelu_pytorch_tanh")}
        if isinstance(scaling := values.get("rope_scaling"), dict) and scaling and "rope_type" not in scaling:
            raise DiffbitError(
                f"rope_scaling is {shown(scaling)}, wanted one with rope_type: in this family transformers skips others"
            )
        tables = values.get("rope_parameters")
        local = get(values, "rope_local_base_freq", Positive, 10000.0)
        if isinstance(tables, dict) and tables:  # transformers 5
            sliding, full = tables.get(SLIDING), tables.get(FULL)
            if not isinstance(full, dict):
                raise DiffbitError(f"rope_parameters is {shown(tables)}, wanted those of {FULL} and {SLIDING}")
            if not isinstance(sliding, dict) or sliding.get("rope_type", "default") != "default":
                raise DiffbitError(
                    f"rope_parameters.{SLIDING} is {shown(sliding)}, wanted plain angles (rope_type default)"
                )
            values["rope_scaling"] = full | get(values, "rope_scaling", Mapping[str, Any], {})
            local = get(sliding, "rope_theta", Positive, local)
        config = super().read({**values, "rope_local_base_freq": local})
        scale = math.sqrt(config.hidden_size) if config.tie_embeddings else 1.0
        return replace(config, hidden_scale=scale)

    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        layer = replace(super().layer(values, index), norms="around")
        if _types(values)[index] == FULL:
            return layer
        return windowed(changed(layer, local_rope=True), values, values.get("sliding_window", 4096))

    def stored(self, config: ModelConfig, name: str) -> Stored:
        place, module = super().stored(config, name), name.split(".")[-2]
        factor = 1.0
        if module == "embed_tokens" or (module == "norm" and config.tie_embeddings):
            factor = math.sqrt(config.hidden_size) if module == "embed_tokens" else config.hidden_size**-0.5
        if module == "q_norm":
            factor = math.sqrt(attention_of(config, name).head_dim / self.query_scalar)
        return replace(place, plus=1.0 if module.endswith("norm") else 0.0, times=factor)


def _types(values: Mapping[str, Any]) -> Sequence[str]:
    """Return each layer's kind: every sixth sees all tokens, unless config.json says otherwise."""
    layers, pattern = get(values, "num_hidden_layers", NumLayers), get(values, "sliding_window_pattern", Count, 6)
    types = tuple(FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layers))
    return layer_types(values, types)


FAMILIES = (
    Gemma3(
        "gemma3_text",
        "softmax",
        architecture="Gemma3ForCausalLM",
        defaults=DEFAULTS,
        qk_norm=True,
        reads=READS,
        names={
            "mixer_output_norm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        },
    ),
)
