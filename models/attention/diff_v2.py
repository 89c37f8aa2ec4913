"""Differential attention, version 2 (hf.co/blog/microsoft/diff-attn-v2; unilm, Diff-Transformer-V2).

    a_j = softmax(q_j k_g^T / sqrt d) v_g    for 2H query sub-heads, both of a pair on kv head g = i // (H/KV)
    o_i = a_2i - sigmoid(lambda_i(x)) * a_2i+1,     lambda(x) = W x: one number per token and head

No head norm and no lambda_init. It is grouped-query attention with twice the query heads and a subtraction after it.
The model_type is diffbit's own; rows on disk lie as in memory.
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
from ..layers.softmax import Arithmetic, LogitsHook, attend, explicit_pairs, in_one_kernel
from ..layers.symmetries import Symmetries

MODEL_TYPE = "diff_llama_v2"
RIDGE = 0.01  # of the mean of the normal equations' diagonal


def symmetries(config: ModelConfig) -> Symmetries:
    """Both heads of a pair share a value and no norm follows: what mixes its channels passes through."""
    shared = config.num_heads // config.num_kv_heads
    key_of = tuple(head // shared for head in range(config.num_heads) for _ in range(2))
    return Symmetries(value_width=config.head_dim, value_scales=True, key_of=key_of)


class Attention(nn.Module):
    cache_in_place = "always"  # in ONNX: GroupQueryAttention writes into a buffer bound as past and as present

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=False)
        self.attn_sub_norm = sub_norm(config, heads * width)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)
        self.lambda_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width
        self.scale = width**-0.5
        self.out_scale = 1.0
        self.logits_hook: LogitsHook | None = None
        self.arithmetic: Arithmetic | None = None

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        projected = self._projected(x, rope)
        if self.logits_hook is None and self.arithmetic is None and in_one_kernel(projected[0], mask, cache):
            from ..layers.triton_attention import diff_attention

            out = diff_attention(*projected, self.lambda_of(x).squeeze(-1), self.scale)  # [B, S, H, d]
        else:
            signal, noise = self._branches(*projected, mask, cache)
            out = (signal - self.lambda_of(x) * noise).to(x.dtype).transpose(1, 2)  # of fp32 [B, H, S, d]
        return self.o_proj(self.attn_sub_norm(out.flatten(2)))

    def branches(self, x: Tensor, rope: Rope, mask: Tensor | None, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """a_2i and a_2i+1, fp32 [B, H, S, d]."""
        return self._branches(*self._projected(x, rope), mask, cache)

    def _projected(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, 2H, d] and key [B, S, KV, d], rotated, and value [B, S, KV, d]."""
        query = apply_rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        key = apply_rope(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        return query, key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _branches(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, heads, S, d]
        if cache is not None:
            key, value = cache.append(key, value)  # [B, KV, T, d]
        if self.logits_hook is not None or self.arithmetic is not None:
            return explicit_pairs(query, (key, key), value, mask, self.scale, self.arithmetic, self.logits_hook)
        out = attend(query, key, value, mask, self.scale).float()  # [B, 2H, S, d]
        return out[:, 0::2], out[:, 1::2]

    def lambda_of(self, x: Tensor) -> Tensor:
        """sigmoid(lambda(x)), fp32 [B, H, S, 1]."""
        return self.lambda_proj(x).float().sigmoid().transpose(1, 2)[..., None]

    def refit_lambda(self, x: Tensor, wanted: Tensor, weight: Tensor) -> None:
        """One Gauss-Newton step of lambda_proj towards the least sum of weight (lambda - wanted)^2, both [T, H].

        x: fp32 [T, E]. The sigmoid is taken as linear around its present value, and a ridge keeps directions that
        the tokens hardly tell about where they are.
        """
        before = self.lambda_proj.weight.detach().float()
        present = (x @ before.T).sigmoid()  # [T, H]
        slope = present * (1 - present)
        moved = before.clone()
        for head in range(len(before)):
            rows = x * (slope[:, head] * weight[:, head].sqrt())[:, None]
            error = (wanted[:, head] - present[:, head]) * weight[:, head].sqrt()
            normal = (rows.T @ rows).double()
            normal.diagonal().add_(RIDGE * float(normal.diagonal().mean()) + 1e-30)
            moved[head] += torch.linalg.solve(normal, (rows.T @ error).double()).float()
        self.lambda_proj.weight = nn.Parameter(moved)

    def lambda_value(self) -> Tensor | None:
        return None

    def onnx(self, g: Any, step: Any, x: Any, past: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same in ONNX: x [B, S, E] -> output, the cache with x. g: export/graph.py, step: decoder.py."""
        query = g.linear(x, self.q_proj, "q_proj")
        key = g.linear(x, self.k_proj, "k_proj")
        value = g.linear(x, self.v_proj, "v_proj")
        weight = g.op("Sigmoid", [g.linear(x, self.lambda_proj, "lambda_proj")])  # [B, S, H]
        if step.low_bit:
            lambda_ = g.cast(weight, "float32")
            heads, present = step.diff_attention(
                query,
                key,
                value,
                lambda_,
                past,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                scale=self.scale,
            )
            return g.linear(g.norm(heads, self.attn_sub_norm, "attn_sub_norm"), self.o_proj, "o_proj"), present
        out, present = step.softmax_attention(
            query,
            key,
            value,
            past,
            num_heads=2 * self.num_heads,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
        )
        pairs = g.op("Reshape", [out, g.const([0, 0, self.num_heads, 2 * self.head_dim])])
        signal, noise = g.op("Split", [pairs], outputs=2, axis=-1, num_outputs=2)  # [B, S, H, d]
        noise = g.op("Mul", [noise, g.op("Unsqueeze", [weight, g.const([-1])])])
        heads = g.op("Reshape", [g.op("Sub", [signal, noise]), g.const([0, 0, self.num_heads * self.head_dim])])
        return g.linear(g.norm(heads, self.attn_sub_norm, "attn_sub_norm"), self.o_proj, "o_proj"), present

    @staticmethod
    def hf_heads(config: ModelConfig) -> tuple[int, int]:
        return 2 * config.num_heads, config.num_kv_heads

    @staticmethod
    def heads_from_hf(query_heads: int, kv_heads: int) -> tuple[int, int]:
        if query_heads % 2:
            raise DiffbitError(
                f"num_attention_heads is {query_heads}, wanted an even number: differential attention pairs a signal "
                "with a noise head"
            )
        if (query_heads // 2) % kv_heads:
            raise DiffbitError(
                f"num_attention_heads is {query_heads}, wanted a multiple of twice num_key_value_heads, which is "
                f"{kv_heads}: both heads of a pair read one key-value head"
            )
        return query_heads // 2, kv_heads

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, pairs

    @staticmethod
    def row_order(config: ModelConfig) -> dict[str, torch.Tensor]:
        return {}

    @staticmethod
    def joint_rows(config: ModelConfig) -> dict[str, int]:
        return {"q_proj": 2 * config.head_dim, "k_proj": config.head_dim, "v_proj": config.head_dim}

    @staticmethod
    def cache_heads(config: ModelConfig) -> int:
        return config.num_kv_heads
