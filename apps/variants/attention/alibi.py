"""Softmax attention with linear biases in place of RoPE (ALiBi, arXiv 2108.12409, section 3).

    A_h = softmax(q_h k_g^T / sqrt d - m_h (t - s)),    m_h = 2^(-8 h / H),    h = 1 ... H

t - s is the distance of a query and a key, in real tokens. Each softmax head has its slope m_h: 1/2 ... 1/256 with 8
heads. The authors' code takes other slopes where H is not a power of 2; here the formula holds for any H. A head of
differential attention has one slope for its signal and its noise (alibi_diff_v1.py, alibi_diff_v2.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from ....io.fields import one_of
from ....models.attention import softmax
from ....models.mixers import Graph, Place, Value
from ._biased import Biased, BiasedOptions

NoRope = Annotated[bool, one_of(False, words="false: biases take the place of rotations")]


@dataclass(frozen=True)
class Options(BiasedOptions, softmax.Options):
    rope: NoRope = field(default=False, kw_only=True)

    def module(self, place: Place) -> Alibi:
        return Alibi(self, place)


class LinearBias(Biased):
    @property
    def slopes(self) -> Tensor:
        """m, fp32 [H, 1, 1]."""
        return 2.0 ** (-8 * torch.arange(1.0, self.num_heads + 1) / self.num_heads)[:, None, None]

    def bias_of(self, query: Tensor, key: Tensor) -> Tensor:
        return self.slopes.to(key.device) * (key - query)

    def onnx_bias_of(self, g: Graph, query: Value, key: Value) -> Value:
        distance = g.cast(g.op("Sub", [key, query]), np.float32)
        return g.op("Mul", [distance, g.const(self.slopes.numpy(), np.float32)])


class Alibi(LinearBias, softmax.Softmax):
    pass
