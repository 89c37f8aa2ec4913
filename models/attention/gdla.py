"""Grouped differential latent attention (Motif-3, arXiv 2608.09119): latent attention with shared noise heads.

    a_h = the heads of mla.py, in groups of R signal heads and then their noise head; R = noise_ratio
    o_i = a_i - sigmoid(lambda_i(x)) a_noise(i),     lambda(x) = W x + b: one number per token and signal head
    o_i = o_i * sigmoid(W_g c_q)                     with a gate, number by number

Motif-3's names of these weights (MotifTechnologies' vLLM, vllm/model_executor/models/motif.py):

    wq_a, q_norm, wq_b       q_a_proj, q_a_layernorm, q_b_proj         wq_b_gate      g_proj
    wkv_a, kv_norm, wkv_b    kv_a_proj, kv_a_layernorm, kv_b_proj      lambda_proj    lambda_proj      wo    o_proj

Its sliding_window does not count the token itself; the option of that name does.

num_heads counts signal heads, H, and softmaxes are H + H/R. All heads of a group read one kv head. Lambda is float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from ...io.errors import DiffbitError
from ...io.fields import Count
from ..mixers import Graph, Place, Value
from . import mla


@dataclass(frozen=True)
class Options(mla.Options):
    """gate: whether heads have a gate. lambda_bias: whether lambda has the bias b [H]."""

    noise_ratio: Count = field(default=4, kw_only=True)
    gate: bool = field(default=True, kw_only=True)
    lambda_bias: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate and not self.query_rank:
            raise DiffbitError("gate is true and query_rank 0, wanted a query_rank: the gate reads the queries' latent")

    def module(self, place: Place) -> GroupedDifferential:
        return GroupedDifferential(self, place)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, max(1, pairs // 2)

    @staticmethod
    def equal_sizes(pairs: int, head_dim: int) -> dict[str, int]:
        """As mla's, but of 5/4 H query heads, H/4 kv heads, a gate and lambda: E times

        query_rank + 2.5 query_rank + query_rank + (latent_rank + d) + latent_rank / 2 + H + E = 4 E
        """
        heads = 2 * pairs
        hidden = heads * head_dim
        query_rank = 8 * round((2.25 * hidden - head_dim - heads) / 36)
        return mla.Options.equal_sizes(pairs, head_dim) | {"query_rank": query_rank}

    @property
    def softmaxes(self) -> int:
        return self.num_heads + self.num_heads // self.noise_ratio

    @property
    def inner(self) -> tuple[str, ...]:
        return (*super().inner, "g_proj") if self.gate else super().inner

    @property
    def float_linears(self) -> tuple[str, ...]:
        return (*super().float_linears, "lambda_proj")


class GroupedDifferential(mla.LatentAttention):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        self.noise_ratio = options.noise_ratio
        self.lambda_proj = nn.Linear(place.hidden_size, options.num_heads, bias=options.lambda_bias)
        self.g_proj = nn.Linear(options.query_rank, options.width, bias=False) if options.gate else None

    def combined(self, heads: Tensor, x: Tensor, c_q: Tensor) -> Tensor:
        groups = heads.float().unflatten(1, (-1, self.noise_ratio + 1))  # [B, H/R, R + 1, S, e]
        lambda_ = self.lambda_proj(x).float().sigmoid().transpose(1, 2).unflatten(1, (-1, self.noise_ratio))
        out = (groups[:, :, :-1] - lambda_[..., None] * groups[:, :, -1:]).flatten(1, 2)
        if self.g_proj is None:
            return out
        return out * self.g_proj(c_q).float().sigmoid().unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def onnx_lambda(self, g: Graph, x: Value) -> dict[str, Value]:
        return {"lambda": g.op("Sigmoid", [g.cast(g.linear(x, self.lambda_proj, "lambda_proj"), np.float32)])}

    def onnx_gated(self, g: Graph, out: Value, c_q: Value) -> Value:
        if self.g_proj is None:
            return out
        return g.op("Mul", [out, g.op("Sigmoid", [g.linear(c_q, self.g_proj, "g_proj")])])
