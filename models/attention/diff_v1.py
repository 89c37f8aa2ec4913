"""Differential attention, version 1 (arXiv 2410.05258, eq. 1-3).

    A1 = softmax(q_2i k_2g^T / sqrt d),  A2 = softmax(q_2i+1 k_2g+1^T / sqrt d),   g = i // (H/KV)
    o_i = (1 - lambda_init) * RMSNorm((A1 - lambda A2) v_g)          v_g and o_i are 2d wide
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    lambda_init = 0.8 - 0.6 exp(-0.3 l),   l = 0, 1, ... the layer

The head norm has no weight and runs in float32, and so does lambda: rounding each exp() to bfloat16 costs up to 9e-3
in lambda. Rows of q_proj and k_proj lie in adjacent pairs (signal, noise); Hugging Face's diffllama has all signal
heads first, then all noise heads, and all first halves of the values before all second halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import DiffbitError
from ..cache import LayerCache
from ..config import ModelConfig
from ..layers.norm import sub_norm
from ..layers.rope import Rope, apply_rope
from ..layers.softmax import Arithmetic, LogitsHook, attend, explicit_pairs, in_one_kernel
from ..layers.symmetries import Symmetries

MODEL_TYPE = "diffllama"
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def lambda_init(layer_index: int) -> float:
    """0.2 in layer 0, growing towards 0.8."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


def symmetries(config: ModelConfig) -> Symmetries:
    """Rotations of the 2d-wide value pass through the difference and through the head norm, which has no weight;
    scales do not.
    """
    shared = config.num_heads // config.num_kv_heads
    key_of = tuple(2 * (head // shared) + branch for head in range(config.num_heads) for branch in (0, 1))
    return Symmetries(value_width=2 * config.head_dim, key_of=key_of)


class Attention(nn.Module):
    cache_in_place = "native"  # in ONNX: DiffAttention's kernel writes into its buffer, its body returns a longer one
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, 2 * kv_heads * width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, 2 * kv_heads * width, bias=False)
        self.attn_sub_norm = sub_norm(config, 2 * heads * width)
        self.o_proj = nn.Linear(2 * heads * width, config.hidden_size, bias=False)
        for name in LAMBDAS:
            vector = torch.empty(width, dtype=torch.float32)
            if not vector.is_meta:  # as in Decoder: nothing random on the meta device
                vector.normal_(0, 0.1)
            self.register_parameter(name, nn.Parameter(vector))
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width
        self.scale = width**-0.5
        self.norm_eps = config.norm_eps
        self.lambda_init = lambda_init(layer_index)
        self.out_scale = 1.0 - self.lambda_init
        self.logits_hook: LogitsHook | None = None
        self.arithmetic: Arithmetic | None = None

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        projected = self._projected(x, rope)
        if self.logits_hook is None and self.arithmetic is None and in_one_kernel(projected[0], mask, cache):
            out = self._in_one_kernel(*projected)  # [B, S, H, 2d]
        else:
            signal, noise = self._branches(*projected, mask, cache)
            out = signal - self.lambda_of(x) * noise  # fp32 [B, H, S, 2d]
            out = F.rms_norm(out, out.shape[-1:], eps=self.norm_eps).to(x.dtype).transpose(1, 2)
        return self.o_proj(self.attn_sub_norm(out.flatten(2))) * self.out_scale

    def branches(self, x: Tensor, rope: Rope, mask: Tensor | None, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """A1 v and A2 v, fp32 [B, H, S, 2d]."""
        return self._branches(*self._projected(x, rope), mask, cache)

    def _projected(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, 2H, d] and key [B, S, 2KV, d], rotated, and value [B, S, 2KV, d]."""
        query = apply_rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        key = apply_rope(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        return query, key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _in_one_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The normed difference, [B, S, H, 2d]."""
        from ..layers.triton_attention import diff_attention

        lambda_ = self.lambda_value().expand(query.shape[0], self.num_heads, query.shape[1])
        wide = value.unflatten(2, (-1, 2)).flatten(3)  # [B, S, KV, 2d]
        return diff_attention(query, key, wide, lambda_, self.scale, self.norm_eps)

    def _branches(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, heads, S, d]
        if cache is not None:
            key, value = cache.append(key, value)  # [B, 2KV, T, d]
        value = torch.cat((value[:, 0::2], value[:, 1::2]), dim=-1)  # [B, KV, T, 2d]
        keys = key[:, 0::2], key[:, 1::2]
        if self.logits_hook is not None or self.arithmetic is not None:
            return explicit_pairs(query, keys, value, mask, self.scale, self.arithmetic, self.logits_hook)
        signal, noise = (attend(query[:, branch::2], keys[branch], value, mask, self.scale) for branch in (0, 1))
        return signal.float(), noise.float()

    def lambda_of(self, x: Tensor) -> Tensor:
        """What the noise branch is multiplied by; the same for all tokens x."""
        return self.lambda_value()

    def lambda_value(self) -> Tensor:
        """lambda of this layer: an fp32 scalar that gradients flow through."""
        first = (self.lambda_q1.float() * self.lambda_k1.float()).sum().exp()
        second = (self.lambda_q2.float() * self.lambda_k2.float()).sum().exp()
        return first - second + self.lambda_init

    def refit_lambda(self, x: Tensor, wanted: Tensor, weight: Tensor) -> None:
        """The lambda of least sum weight (lambda - wanted)^2, both [T, H]; lambda_q1 moves, along lambda_k1."""
        value = float((weight.double() * wanted).sum() / weight.double().sum())
        first, along = self.lambda_q1.detach().double(), self.lambda_k1.detach().double()
        second = float((self.lambda_q2.detach().double() @ self.lambda_k2.detach().double()).exp())
        power = value - self.lambda_init + second  # what exp(lambda_q1 . lambda_k1) has to be
        if not power > 0 or not along.any():
            raise DiffbitError(
                f"lambda would have to be {value:.4g}, but these vectors reach only values above "
                f"{self.lambda_init - second:.4g}: the layer is too far from its float model to be refitted"
            )
        moved = first + (math.log(power) - first @ along) / (along @ along) * along
        self.lambda_q1 = nn.Parameter(moved.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep the lambda vectors float32 when the model is moved with .to(bfloat16), .half(), ..."""
        before = {name: getattr(self, name).detach() for name in LAMBDAS}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            parameter = getattr(self, name)
            if parameter.dtype != torch.float32:
                parameter.data = kept.to(parameter.device)
        return self

    def onnx(self, g: Any, step: Any, x: Any, past: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same in ONNX: x [B, S, E] -> output, the cache with x. g: export/graph.py, step: decoder.py."""
        lambda_ = self.lambda_value()
        out, present = step.diff_attention(
            g.linear(x, self.q_proj, "q_proj"),
            g.linear(x, self.k_proj, "k_proj"),
            g.linear(x, self.v_proj, "v_proj"),
            g.const([lambda_.item()] * self.num_heads, "float32"),
            past,
            num_heads=self.num_heads,
            num_kv_heads=2 * self.num_kv_heads,
            wide_value=1,
            scale=self.scale,
            norm_eps=self.norm_eps,
        )
        out = g.norm(out, self.attn_sub_norm, "attn_sub_norm")
        return g.linear(out, self.o_proj, "o_proj", self.out_scale), present

    @staticmethod
    def hf_heads(config: ModelConfig) -> tuple[int, int]:
        return 2 * config.num_heads, 2 * config.num_kv_heads

    @staticmethod
    def heads_from_hf(query_heads: int, kv_heads: int) -> tuple[int, int]:
        for name, count in (("num_attention_heads", query_heads), ("num_key_value_heads", kv_heads)):
            if count % 2:
                raise DiffbitError(
                    f"{name} is {count}, wanted an even number: differential attention pairs a signal with a noise head"
                )
        if query_heads % kv_heads:
            raise DiffbitError(
                f"num_attention_heads is {query_heads}, wanted a multiple of num_key_value_heads, which is {kv_heads}"
            )
        return query_heads // 2, kv_heads // 2

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return pairs, pairs

    @staticmethod
    def row_order(config: ModelConfig) -> dict[str, Tensor]:
        return {
            "q_proj": _pairs_from_halves(config.num_heads, config.head_dim),
            "k_proj": _pairs_from_halves(config.num_kv_heads, config.head_dim),
            "v_proj": _pairs_from_halves(config.num_kv_heads, config.head_dim),
        }

    @staticmethod
    def joint_rows(config: ModelConfig) -> dict[str, int]:
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), 2 * config.head_dim)

    @staticmethod
    def cache_heads(config: ModelConfig) -> int:
        return 2 * config.num_kv_heads


def _pairs_from_halves(pairs: int, width: int) -> Tensor:
    """Row indices that turn [all first heads, all second heads] into [first, second, first, second, ...]."""
    return torch.arange(2 * pairs * width).view(2, pairs, width).transpose(0, 1).flatten()
