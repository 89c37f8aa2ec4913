"""Softmax attention of a plain Transformer with grouped key-value heads (arXiv 1706.03762, eq. 1; 2305.13245).

o_h = softmax(q_h k_g^T / sqrt d) v_g,    g = h // (H/KV)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DiffbitError
from ..cache import LayerCache
from ..config import ModelConfig
from ..layers.norm import sub_norm
from ..layers.rope import Rope, apply_rope
from ..layers.softmax import Arithmetic, LogitsHook, attend, explicit_softmax
from ..layers.symmetries import Symmetries

MODEL_TYPE = "llama"


def symmetries(config: ModelConfig) -> Symmetries:
    """A head is a mean of its values: what mixes their channels passes through."""
    shared = config.num_heads // config.num_kv_heads
    key_of = tuple(head // shared for head in range(config.num_heads))
    return Symmetries(value_width=config.head_dim, value_scales=True, key_of=key_of)


class Attention(nn.Module):
    cache_in_place = "always"  # in ONNX: GroupQueryAttention writes into a buffer bound as past and as present

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=False)
        self.attn_sub_norm = sub_norm(config, heads * width)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width
        self.scale = width**-0.5
        self.out_scale = 1.0
        self.logits_hook: LogitsHook | None = None
        self.arithmetic: Arithmetic | None = None

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        return self.o_proj(self.attn_sub_norm(self.heads(x, rope, mask, cache).transpose(1, 2).flatten(2)))

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """What the heads find, before the output projection: [B, H, S, d]."""
        query = apply_rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rope).transpose(1, 2)  # [B, H, S, d]
        key = apply_rope(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rope).transpose(1, 2)  # [B, KV, S, d]
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if cache is not None:
            key, value = cache.append(key, value)  # [B, KV, T, d]
        if self.logits_hook is None and self.arithmetic is None:
            return attend(query, key, value, mask, self.scale)
        arithmetic = self.arithmetic or Arithmetic()
        probabilities = explicit_softmax(arithmetic.logits(query, key, self.scale, 0), mask, self.logits_hook)
        return arithmetic.mix(probabilities, value, self.head_dim).to(x.dtype)

    def lambda_value(self) -> Tensor | None:
        return None

    def onnx(self, g: Any, step: Any, x: Any, past: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same in ONNX: x [B, S, E] -> output, the cache with x. g: export/graph.py, step: decoder.py."""
        out, present = self.onnx_heads(g, step, x, past)
        return g.linear(g.norm(out, self.attn_sub_norm, "attn_sub_norm"), self.o_proj, "o_proj"), present

    def onnx_heads(self, g: Any, step: Any, x: Any, past: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """`heads` in ONNX: [B, S, H*d], the cache with x."""
        return step.softmax_attention(
            g.linear(x, self.q_proj, "q_proj"),
            g.linear(x, self.k_proj, "k_proj"),
            g.linear(x, self.v_proj, "v_proj"),
            past,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
        )

    @staticmethod
    def hf_heads(config: ModelConfig) -> tuple[int, int]:
        return config.num_heads, config.num_kv_heads

    @staticmethod
    def heads_from_hf(query_heads: int, kv_heads: int) -> tuple[int, int]:
        if query_heads % kv_heads:
            raise DiffbitError(
                f"num_attention_heads is {query_heads}, wanted a multiple of num_key_value_heads, which is {kv_heads}"
            )
        return query_heads, kv_heads

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, 2 * pairs

    @staticmethod
    def row_order(config: ModelConfig) -> dict[str, torch.Tensor]:
        return {}

    @staticmethod
    def joint_rows(config: ModelConfig) -> dict[str, int]:
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.head_dim)

    @staticmethod
    def cache_heads(config: ModelConfig) -> int:
        return config.num_kv_heads
