"""Checkpoints whose attention modules are those of microsoft/unilm, Diff-Transformer (the official code).

Their config.json has the model_type of diffllama or diff_llama_v2, and "rope_interleaved": true. The tensors outside
attention have Hugging Face's names; inside `self_attn` the official modules differ:

- rotary embedding is interleaved: it rotates the pairs (x_2j, x_2j+1) of a head. Taking the even rows of each head's
  q_proj and k_proj first, then the odd ones, gives rotate-half;
- version 1: sub-heads are in adjacent pairs and a value is 2d contiguous rows, which is diffbit's canonical order; the
  output projection is `out_proj`; the head norm has a weight `subln.weight` [2d], shared by the heads, which is folded
  into the projection: o_proj[:, h, c] = out_proj * subln[c];
- version 2 has `lambda_proj` and `o_proj` (`out_proj` is read too).

The official head norm has eps = 1e-5, whatever rms_norm_eps says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..layers.rope import interleaved
from . import diff_llama_v2, diffllama
from ._family import ROPE, Family, Stored
from ._huggingface import HuggingFace, attention_of, changed

HEAD_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Official(Family):
    base: HuggingFace  # the family that reads config.json
    quantized = False

    def knows(self, values: Mapping[str, Any]) -> bool:
        return values.get("model_type") == self.model_type and values.get("rope_interleaved") is True

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        config = self.base.read(values)
        if self.base.attention != "diff_v1":
            return config
        return replace(config, layers=tuple(changed(layer, norm_eps=HEAD_NORM_EPS) for layer in config.layers))

    def stored(self, config: ModelConfig, name: str) -> Stored:
        before, _, tensor = name.rpartition(".self_attn.")
        if tensor == "o_proj.weight":
            names = (f"{before}.self_attn.out_proj.weight", name)
            if self.base.attention != "diff_v1":
                return Stored(names)
            width = 2 * attention_of(config, name).head_dim
            return Stored(names, folded=f"{before}.self_attn.subln.weight", folded_width=width)
        if tensor not in ("q_proj.weight", "k_proj.weight"):
            return Stored((name,))
        mixer = attention_of(config, name)
        heads = mixer.softmaxes if tensor == "q_proj.weight" else mixer.cache_heads
        return Stored((name,), interleaved(heads, mixer.head_dim))


FAMILIES = tuple(
    Official(base.model_type, base, reads=ROPE | {"rope_interleaved"})
    for base in (diffllama.FAMILIES[0], diff_llama_v2.FAMILIES[0])
)
