"""Motif-Technologies' Motif: differential attention version 1 with PolyNorm MLPs, read only.

Motif-2.6B (arXiv 2508.09148) and Motif-2-12.7B (arXiv 2511.07464) have one model_type. In the latter `num_noise_heads`
noise heads are each shared by a group of signal heads (grouped differential attention, arXiv 2510.06949):
num_attention_heads counts both, and rows of q_proj are in groups, signal heads first. Without that field each signal
head has a noise head, in adjacent pairs. Queries, keys and values have diffbit's canonical order. RoPE is rotate-half.
Differences from diffllama:

- lambda_init counts layers from -1: 0.8 - 0.6 exp(-0.3 (l - 1)) of layer l = 0, 1, ...
- the head norm has its own eps, `attn_rms_norm_eps`, and a weight `subln.weight` [2d] that the heads share; it is
  folded into o_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get, shown
from ..attention import diff_v1
from ..config import LayerSpec, ModelConfig
from ._family import Stored
from ._huggingface import HuggingFace, attention_of, changed

HEAD_NORM_EPS = 1e-5  # default
REFUSED = ("use_bias", "use_sliding_window", "kv_lora_rank", "num_experts")  # the last two: Motif-3


class Motif(HuggingFace):
    quantized = False

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        for name in REFUSED:
            if values.get(name):
                raise DiffbitError(f"{name} is {shown(values[name])}, wanted none, as in Motif-2.6B and Motif-2-12.7B")
        if get(values, "k_ratio", Count, 1) != 1:
            raise DiffbitError(f"k_ratio is {values['k_ratio']}, wanted 1: a signal and a noise key for each value")
        return super().read(_paired(values))

    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        noises = get(values, "num_noise_heads", Count, None)
        return changed(
            super().layer(values, index),
            norm_eps=get(values, "attn_rms_norm_eps", Positive, HEAD_NORM_EPS),
            noise_ratio=1 if noises is None else values["num_attention_heads"] // 2 // noises,
            lambda_init=diff_v1.lambda_init(index - 1),
        )

    def stored(self, config: ModelConfig, name: str) -> Stored:
        before, _, tensor = name.rpartition(".self_attn.")
        if tensor != "o_proj.weight":
            return Stored((name,))
        width = 2 * attention_of(config, name).head_dim
        return Stored((name,), folded=f"{before}.self_attn.subln.weight", folded_width=width)


def _paired(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with num_attention_heads as if each signal head had its own noise head."""
    if values.get("num_noise_heads") is None:
        return values
    heads, noises = get(values, "num_attention_heads", Count), get(values, "num_noise_heads", Count)
    signals = heads - noises
    if signals < noises or signals % noises:
        raise DiffbitError(
            f"num_noise_heads is {noises} and num_attention_heads is {heads}, wanted a multiple of num_noise_heads"
        )
    if values.get("head_dim") is None:
        raise DiffbitError("head_dim is missing, which num_noise_heads requires")
    return {**values, "num_attention_heads": 2 * signals}


DEFAULTS = {"hidden_act": "poly_norm", "rms_norm_eps": 1e-6}
FAMILIES = (Motif("Motif", "diff_v1", queries=2, keys=2, defaults=DEFAULTS),)
