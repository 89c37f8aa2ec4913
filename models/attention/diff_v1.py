"""Differential attention, version 1 (arXiv 2410.05258, eq. 1-3).

    A1 = softmax(q_2i k_2g^T / sqrt d),  A2 = softmax(q_2i+1 k_2g+1^T / sqrt d),   g = i // (H/KV)
    o_i = (1 - lambda_init) * RMSNorm((A1 - lambda A2) v_g)          v_g and o_i are 2d wide
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    lambda_init = 0.8 - 0.6 exp(-0.3 l),   l = 0, 1, ... the layer

The head norm has no weight (a learned weight is folded into o_proj) and is computed in float32, as is lambda: rounding
each exp() to bfloat16 changes lambda by up to 9e-3. Rows of q_proj and k_proj are in adjacent pairs (signal, noise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from ...io.fields import Count, NotNegative, Rule
from ..graph import Cache, Graph, Heads, Value
from ..mixers import Operations, Place, Symmetries
from ._attention import AttentionOptions, Differential

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def lambda_init(layer_index: int) -> float:
    """0.2 in layer 0, growing towards 0.8; Motif counts layers from -1."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


@dataclass(frozen=True)
class Options(AttentionOptions):
    """norm_eps: of the head norm; 0: no head norm. lambda_init: a fixed value; None: computed from the layer's index,
    as above. noise_ratio: signal heads per noise head."""

    norm_eps: NotNegative = 1e-5
    lambda_init: Annotated[float, Rule("{} between -1 and 1", lambda value: -1 < value < 1)] | None = None
    noise_ratio: Count = 1

    wide_value = 1

    def module(self, place: Place) -> DiffV1:
        return DiffV1(self, place)

    def symmetries(self) -> Symmetries:
        """Rotations of the 2d-wide value pass through the difference and through the head norm, which has no weight;
        scales pass only without a head norm."""
        shared, group = self.num_heads // self.num_kv_heads, (0,) * self.noise_ratio + (1,)
        signals = range(0, self.num_heads, self.noise_ratio)
        key_of = tuple(2 * (signal // shared) + branch for signal in signals for branch in group)
        return Symmetries(value_width=2 * self.head_dim, value_scales=not self.head_norm, key_of=key_of)

    @property
    def head_norm(self) -> bool:
        return self.norm_eps > 0

    @property
    def cache_heads(self) -> int:
        return 2 * self.num_kv_heads

    @property
    def softmaxes(self) -> int:
        return self.num_heads + self.num_heads // self.noise_ratio

    @property
    def width(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def operations(self, context: int, low_bit: bool) -> Operations:
        """The difference of the attention weights, one product with the values, and the norm of 2d numbers per head."""
        plain = super().operations(context, low_bit)
        context, norm = self.seen(context), 4 * self.head_dim if self.head_norm else 0
        other = plain.other + self.num_heads * (context + norm)
        return replace(plain, matrix=self.width * context, other=other)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return pairs, pairs


class DiffV1(Differential):
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        for name in LAMBDAS:
            vector = torch.empty(options.head_dim, dtype=torch.float32)
            if not vector.is_meta:  # as in Decoder, no random numbers on the meta device
                vector.normal_(0, 0.1)
            self.register_parameter(name, nn.Parameter(vector))
        self.norm_eps = options.norm_eps
        self.lambda_init = lambda_init(place.index) if options.lambda_init is None else options.lambda_init
        self.out_scale = 1.0 - self.lambda_init

    def by_branch(self, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
        return [key[:, 0::2], key[:, 1::2]], torch.cat((value[:, 0::2], value[:, 1::2]), dim=-1)

    def lambda_of(self, x: Tensor) -> Tensor:
        return self.lambda_value()

    def lambda_value(self) -> Tensor:
        """Return this layer's lambda, an fp32 scalar with gradients."""
        first = (self.lambda_q1.float() * self.lambda_k1.float()).sum().exp()
        second = (self.lambda_q2.float() * self.lambda_k2.float()).sum().exp()
        return first - second + self.lambda_init

    def derived(self) -> dict[str, Tensor]:
        return {"lambda": self.lambda_value()}

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        return self.onnx_attention(
            g,
            x,
            g.const([self.lambda_value().item()] * self.num_heads, "float32"),
            past,
            Heads(
                self.num_heads,
                2 * self.num_kv_heads,
                self.head_dim,
                self.noise_ratio,
                Options.wide_value,
                self.norm_eps,
            ),
            gates=self.onnx_gates(g, x),
        )
