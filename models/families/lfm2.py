"""Liquid AI's lfm2 (LFM2, arXiv 2511.23404): gated short convolutions, and attention with normed queries and keys in
some layers; read only.

Layers of layer_types, or else those not in full_attn_idxs, are "conv": models/mixers/short_conv.py. With
block_auto_adjust_ff_dim, the MLP's width is two thirds of intermediate_size, times block_ffn_dim_multiplier, rounded up
to a multiple of block_multiple_of. tie_embedding and block_ff_dim are older names, which take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get, one_of, shown
from ..config import LayerSpec, ModelConfig, NumLayers
from ..mixers import short_conv
from ._family import ROPE, Stored, parts
from ._huggingface import FULL, HuggingFace

CONV = "conv"


class Lfm2(HuggingFace):
    quantized = False

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        get(values, "hidden_act", Annotated[str, one_of("silu")], "silu")  # transformers reads none
        tied, width = (
            values.get(new if values.get(old) is None else old)
            for old, new in (("tie_embedding", "tie_word_embeddings"), ("block_ff_dim", "intermediate_size"))
        )
        fields = {
            "tie_word_embeddings": True if tied is None else tied,
            "intermediate_size": _width({**values, "intermediate_size": width}),
            "rms_norm_eps": get(values, "norm_eps", Positive, 1e-5),
        }
        return super().read({**values, **fields})

    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        layer = super().layer(values, index)
        if _types(values)[index] == FULL:
            return layer
        width, bias = get(values, "conv_L_cache", Count, 3), get(values, "conv_bias", bool, False)
        return replace(layer, mixer=short_conv.Options(get(values, "hidden_size", Count), width, bias))

    def stored(self, config: ModelConfig, name: str) -> Stored:
        place = super().stored(config, name)
        (there,), (index, _, _) = place.names, parts(name)
        if index is not None and isinstance(config.layers[int(index)].mixer, short_conv.Options):
            there = there.replace(".self_attn.", ".conv.")
        return replace(place, names=(there.replace(".mlp.", ".feed_forward."),))


def _types(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return each layer's kind, FULL or CONV."""
    count = get(values, "num_hidden_layers", NumLayers)
    attentive = get(values, "full_attn_idxs", tuple[int, ...], tuple(range(count)))
    default = tuple(FULL if index in attentive else CONV for index in range(count))
    types: tuple[str, ...] = get(values, "layer_types", tuple[Annotated[str, one_of(FULL, CONV)], ...], default)
    if len(types) != count:
        raise DiffbitError(f"layer_types is {shown(list(types))}, wanted {count} of {FULL} and {CONV}")
    return types


def _width(values: Mapping[str, Any]) -> int:
    """Return the MLP's width."""
    width = get(values, "intermediate_size", Count)
    if not get(values, "block_auto_adjust_ff_dim", bool, True):
        return int(width)
    multiple = get(values, "block_multiple_of", Count, 256)
    width = int(get(values, "block_ffn_dim_multiplier", Positive, 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


FAMILIES = (
    Lfm2(
        "lfm2",
        "softmax",
        architecture="Lfm2ForCausalLM",
        defaults={"rope_theta": 1000000.0, "max_position_embeddings": 128000, "num_key_value_heads": 8},
        biases=(),
        qk_norm=True,
        reads=ROPE | {"layer_types", "block_ffn_dim_multiplier"},
        names={
            "norm": "embedding_norm",
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
            "o_proj": "out_proj",
            "conv1d": "conv",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
        },
    ),
)
