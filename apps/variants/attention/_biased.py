"""A bias of attention's logits that depends on positions, for each variant of the core: position biases and patterns.

    A = softmax(q k^T / sqrt d + b(t, s))      t, s: positions of query and key, counted over real tokens

A class that inherits from Biased and from a variant gives it the bias: `b` is one function of positions, written with
the operators of torch or of the graph. No kernel computes it. Its body (ops/diff_attention.py, Changed) has caches of
all formats and windows, holds [H, S, T] biases, and returns a new cache in every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.attention import Attention, AttentionOptions
from ....models.mixers import Graph, Value


class BiasedOptions(AttentionOptions):
    @property
    def in_place(self) -> str:
        return "never"


class Biased(Attention):
    @property
    def explicit(self) -> bool:
        return True

    def bias_of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the bias [B, 1 or H, S, T] from positions, int64 [B, 1, S, 1] and [B, 1, 1, T]."""
        raise NotImplementedError

    def onnx_bias_of(self, g: Graph, query: Value, key: Value) -> Value:
        """Add `bias_of` as ONNX nodes."""
        raise NotImplementedError

    def bias(self, mask: Tensor | None, length: int, total: int, device: torch.device) -> Tensor:
        real = torch.ones(1, total, device=device) if mask is None else mask[:, 0, -1]  # the last query sees all
        key = real.long().cumsum(-1) - 1
        return self.bias_of(key[:, None, total - length :, None], key[:, None, None, :]).float()

    def onnx_bias(self, g: Graph, x: Value) -> Value:
        key = g.op("Sub", [g.op("CumSum", [g.attention_mask, g.const(1)]), g.const(1)])  # [B, T]
        total = g.op("Shape", [g.attention_mask], start=1)
        length = g.op("Shape", [x], start=1, end=2)  # of the last tokens, not of all new ones (Graph.attention)
        query = g.op("Slice", [key, g.op("Sub", [total, length]), total, g.const([1])])
        return self.onnx_bias_of(
            g, g.op("Unsqueeze", [query, g.const([1, 3])]), g.op("Unsqueeze", [key, g.const([1, 2])])
        )
