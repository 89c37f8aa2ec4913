"""DeepSeek-V2 and V3 as far as their layers are dense: multi-head latent attention and SwiGLU MLPs, read only.

Layers from `first_k_dense_replace` on have experts, which diffbit does not have: such a folder is refused. Differences
from diffbit's order and formula:

- the rotated rows of queries and of the shared key are interleaved, unless `rope_interleave` is false
- yarn with `mscale_all_dim` m multiplies logits by (0.1 m ln factor + 1)^2, which is folded into the queries
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get
from ..attention import mla
from ..config import ModelConfig
from ..layers.rope import interleaved
from ._family import ROPE, Family, Stored
from ._huggingface import HuggingFace, attention_of

BASE = HuggingFace("deepseek", "softmax", norm_eps=1e-6, biases=("attention_bias",))
READS = frozenset((  # all but the first two are of layers with experts
    "rope_interleave", "qk_rope_head_dim", "qk_nope_head_dim", "n_routed_experts", "num_experts", "num_local_experts",
    "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq",
))  # fmt: skip


@dataclass(frozen=True)
class DeepSeek(Family):
    quantized = False
    reads: frozenset[str] = ROPE | READS
    is_interleaved: bool = True
    query_factor: float = 1.0

    def opened(self, values: Mapping[str, Any], names: Collection[str]) -> DeepSeek:
        ropes = (get(values, name, Mapping[str, Any], {}) for name in ("rope_scaling", "rope_parameters"))
        rope: Mapping[str, Any] = next(filter(None, ropes), {})
        is_scaled = (rope.get("rope_type") or rope.get("type") or "default") != "default"
        scale, factor = get(rope, "mscale_all_dim", float, 0.0), get(rope, "factor", Positive, 1.0)
        grown = 0.1 * scale * math.log(factor) + 1 if is_scaled and factor > 1 else 1.0
        # null is false to transformers, which does not read it for version 2
        interleave = self.model_type != "deepseek_v3" or bool(values.get("rope_interleave", True))
        return replace(self, is_interleaved=interleave, query_factor=grown**2)

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        if not get(values, "rope_interleave", bool, True) and self.model_type != "deepseek_v3":
            raise DiffbitError(f"rope_interleave is false, wanted true, as every {self.model_type} has it")
        dense, layers = get(values, "first_k_dense_replace", int, 0), get(values, "num_hidden_layers", Count)
        if get(values, "n_routed_experts", int, 0) and dense < layers:
            raise DiffbitError(
                f"first_k_dense_replace is {dense}, and later ones of the {layers} layers have experts, wanted dense "
                "layers only: diffbit does not support experts"
            )
        query_rank = get(values, "q_lora_rank", Count, 0)
        config = BASE.read({**values, "head_dim": get(values, "qk_nope_head_dim", Count)})
        base = attention_of(config)
        mixer = mla.Options(
            base.num_heads,
            base.num_kv_heads,
            base.head_dim,
            qkv_bias=base.qkv_bias,
            query_bias=query_rank > 0,
            o_bias=base.o_bias,
            rope_head_dim=get(values, "qk_rope_head_dim", Count),
            value_head_dim=get(values, "v_head_dim", Count),
            latent_rank=get(values, "kv_lora_rank", Count),
            query_rank=query_rank,
        )
        return replace(config, layers=tuple(replace(layer, mixer=mixer) for layer in config.layers))

    def stored(self, config: ModelConfig, name: str) -> Stored:
        mixer = config.layers[0].mixer
        assert isinstance(mixer, mla.Options)
        *path, module, kind = name.split(".")
        stored = Stored((name,))
        if module == "kv_a_proj":
            stored = Stored((".".join((*path, "kv_a_proj_with_mqa", kind)),), self._rows(mixer, 1, mixer.latent_rank))
        elif module == ("q_b_proj" if mixer.query_rank else "q_proj"):
            rows = self._rows(mixer, mixer.num_heads, mixer.head_dim)
            stored = Stored((name,), rows, times=self.query_factor)
        return stored

    def _rows(self, mixer: mla.Options, heads: int, before: int) -> torch.Tensor | None:
        """The order of rows of heads whose rotated rows follow `before` others."""
        if not self.is_interleaved:
            return None
        head = torch.cat((torch.arange(before), before + interleaved(1, mixer.rope_head_dim)))
        return (torch.arange(heads)[:, None] * len(head) + head).flatten()


FAMILIES = (DeepSeek("deepseek_v2"), DeepSeek("deepseek_v3"))
