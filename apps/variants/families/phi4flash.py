"""microsoft/Phi-4-mini-flash-reasoning (SambaY, arXiv 2507.06607), read only: Mamba-1, differential attention, gated
memory units.

Of L layers, from 0, with the half h = L / 2:

    even, up to h       Mamba-1; layer h's scan output is the memory
    odd, below h        differential attention version 1 with a sliding window, the token itself included
    h + 1               the same over all tokens
    even, above h       gated memory unit that reads the memory of layer h
    odd, above h + 1    query-only differential attention over the keys and values of layer h + 1

Norms are LayerNorms, MLPs SwiGLU; there is no RoPE. Sub-heads are in adjacent pairs, diffbit's canonical order.
Projections with the same input are fused: Wqkv (queries, keys, values), fc1 (gate, up), in_proj. The head norm's weight
`subln.weight` [2d], shared by the heads, is folded into out_proj; its eps is 1e-5, whatever layer_norm_eps is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ....io.errors import DiffbitError
from ....io.fields import Count, Positive, get, read, shown
from ....models import LayerSpec, ModelConfig, NumLayers
from ....models.attention import AttentionOptions, diff_v1
from ....models.families import ROPE, Family, Stored, special_tokens
from ....models.mixers import MixerOptions
from ....models.mlp import swiglu
from ..mixers import gmu, mamba

FIXED = {  # fields of config.json whose only supported value is also their default
    "hidden_act": "silu",
    "mb_per_layer": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "rope_scaling": None,
}
TENSORS = {"q_proj": "Wqkv", "k_proj": "Wqkv", "v_proj": "Wqkv", "o_proj": "out_proj"}


class Phi4Flash(Family):
    quantized = False

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        for name, only in FIXED.items():
            if values.get(name, only) != only:
                raise DiffbitError(
                    f"{name} is {shown(values[name])}, wanted {only!r}, as Phi-4-mini-flash-reasoning has it"
                )
        layers, hidden = get(values, "num_hidden_layers", NumLayers), get(values, "hidden_size", Count)
        if layers % 4:
            raise DiffbitError(f"num_hidden_layers is {layers}, wanted a multiple of 4: two halves, in pairs of layers")
        inner = hidden * get(values, "mamba_expand", Count, 2)
        rank = values.get("mamba_dt_rank", "auto")
        memory = mamba.Options(
            inner_size=inner,
            state_size=get(values, "mamba_d_state", Count, 16),
            conv_width=get(values, "mamba_d_conv", Count, 4),
            dt_rank=math.ceil(hidden / 16) if rank == "auto" else get(values, "mamba_dt_rank", Count),
        )
        heads, window, half = _heads(values, hidden), _window(values, layers), layers // 2
        mixers: list[MixerOptions] = []
        for index in range(layers):
            if index % 2:
                behind = index > half + 1
                sliding = window if index < half else 0
                keys_of = half + 1 if behind else None
                mixers.append(diff_v1.Options(**heads, sliding_window=sliding, keys_of=keys_of))
            else:
                mixers.append(memory if index <= half else gmu.Options(inner_size=inner, memory_of=half))
        mlp = swiglu.Options(get(values, "intermediate_size", Count))
        return ModelConfig(
            vocab_size=get(values, "vocab_size", Count),
            hidden_size=hidden,
            layers=tuple(LayerSpec(mixer, mlp) for mixer in mixers),
            max_position=get(values, "max_position_embeddings", Count),
            norm="layer",
            norm_eps=get(values, "layer_norm_eps", Positive, 1e-5),
            tie_embeddings=get(values, "tie_word_embeddings", bool, True),
            **special_tokens(values),
        )

    def stored(self, config: ModelConfig, name: str) -> Stored:
        if name.startswith("model.norm."):
            return Stored((name.replace(".norm.", ".final_layernorm."),))
        if not name.startswith("model.layers."):
            return Stored((name,))
        _, _, index, part, rest = name.split(".", 4)
        before, layer = f"model.layers.{index}", config.layers[int(index)]
        module, _, kind = rest.rpartition(".")
        if part == "mlp":
            inner = layer.mlp.intermediate_size
            if module == "down_proj":
                return Stored((f"{before}.mlp.fc2.{kind}",))
            first = 0 if module == "gate_proj" else inner
            return Stored((f"{before}.mlp.fc1.{kind}",), first=first, of_rows=2 * inner)
        if part != "self_attn":
            return Stored((name,))
        there, mixer = f"{before}.attn", layer.mixer
        if not isinstance(mixer, AttentionOptions) or module == "o_proj":
            tensor = f"{there}.{TENSORS.get(module, module)}.{kind}" if module else f"{there}.{kind}"
            if isinstance(mixer, AttentionOptions) and kind == "weight":
                norm = f"{there}.inner_cross_attn.subln.weight"
                return Stored((tensor,), folded=norm, folded_width=2 * mixer.head_dim)
            return Stored((tensor,))
        if not module:
            return Stored((f"{there}.inner_cross_attn.{kind}",))
        queries, keys = mixer.query_rows, mixer.cache_heads * mixer.head_dim if mixer.keys_of is None else 0
        first = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[module]
        return Stored((f"{there}.Wqkv.{kind}",), first=first, of_rows=queries + 2 * keys)


def _heads(values: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Return the options that all attention layers share; config.json counts sub-heads, two per pair."""
    queries, keys = get(values, "num_attention_heads", Count), get(values, "num_key_value_heads", Count)
    for name, heads in (("num_attention_heads", queries), ("num_key_value_heads", keys)):
        if heads % 2:
            raise DiffbitError(f"{name} is {heads}, wanted an even number: differential attention has pairs of heads")
    if hidden % queries or values.get("head_dim", hidden // queries) != hidden // queries:
        raise DiffbitError(
            f"hidden_size is {hidden}, num_attention_heads {queries} and head_dim {values.get('head_dim')!r}, wanted "
            "head_dim = hidden_size / num_attention_heads"
        )
    sizes = {"num_heads": queries // 2, "num_kv_heads": keys // 2, "head_dim": hidden // queries}
    return {**sizes, "qkv_bias": True, "o_bias": True, "rope": False}


def _window(values: Mapping[str, Any], layers: int) -> int:
    """Return the sliding window, given as one number or, as transformers writes it, a list with null for no window."""
    window = values.get("sliding_window")
    if isinstance(window, list) and len(window) > 1:
        if window != [window[1] if index % 2 and index < layers // 2 else None for index in range(layers)]:
            raise DiffbitError("sliding_window is set for other layers than the odd ones of the first half")
        window = window[1]
    return int(read(Count, window, "sliding_window"))


FAMILIES = (Phi4Flash("phi4flash", reads=ROPE | {"sliding_window"}),)
