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
from ..attention import AttentionOptions, mla
from ..config import LayerSpec, ModelConfig
from ..layers.rope import interleaved
from ._family import ROPE, Stored
from ._huggingface import HuggingFace

READS = frozenset((  # all but the first two are of layers with experts
    "rope_interleave", "qk_rope_head_dim", "qk_nope_head_dim", "n_routed_experts", "num_experts", "num_local_experts",
    "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq",
))  # fmt: skip


@dataclass(frozen=True)
class DeepSeek(HuggingFace):
    quantized = False
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
        return super().read({**values, "head_dim": get(values, "qk_nope_head_dim", Count)})

    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        layer, query_rank = super().layer(values, index), get(values, "q_lora_rank", Count, 0)
        base = layer.mixer
        assert isinstance(base, AttentionOptions)
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
        return replace(layer, mixer=mixer)

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
        """Return the order of rows of heads whose rotated rows follow `before` others."""
        if not self.is_interleaved:
            return None
        head = torch.cat((torch.arange(before), before + interleaved(1, mixer.rope_head_dim)))
        return (torch.arange(heads)[:, None] * len(head) + head).flatten()


FAMILIES = tuple(
    DeepSeek(model_type, "softmax", defaults={"rms_norm_eps": 1e-6}, reads=ROPE | READS)
    for model_type in ("deepseek_v2", "deepseek_v3")
)
