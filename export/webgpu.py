"""The decoder's graph for ONNX Runtime's WebGPU provider: only operators that it has kernels for, and few of them.

A step of decoding costs a GPU a dispatch for each node that computes something, so the layers are built from the
operators that do most in one:

    attention      com.microsoft.GroupQueryAttention, which appends to the cache in place
    weights        com.microsoft.MatMulNBits with float inputs: no rounding of activations, whose blocks differ between
                   providers; so CPU and GPU compute the same
    embedding      com.microsoft.GatherBlockQuantized; a tied table's codes are stored once
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from torch import Tensor, nn

from ..formats import QTensor, QuantLinear
from .grouped import GroupedGraph


class WebGPUGraph(GroupedGraph):
    """Builds the graph as its base class does, with float inputs of low-bit weights, and a float table as GPUs read
    it."""

    accuracy_level = 0

    def stacked_linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> ir.Value | None:
        """Stack three linear layers or more, but not two: their two products take no more dispatches than a product
        and a Split, and ONNX Runtime makes one node of the norm before them, gate, up and the activation
        (MatMulNBitsMlpFusion)."""
        return None if len(modules) == 2 else super().stacked_linears(x, modules)

    def embed(self, table: Tensor | QTensor) -> None:
        """Add the embedding [V, E]. A tied float table is stored as MatMul reads it, [E, V]."""
        if isinstance(table, QTensor) or not self.config.tie_embeddings:
            return super().embed(table if isinstance(table, QTensor) else table.float())
        self._table = self.weight("embed_tokens.weight", table.float().T.numpy())
        columns = self.op("Gather", [self._table, self.input_ids], axis=1)  # [E, B, S]
        self._x = self.op("Transpose", [columns], perm=[1, 2, 0])

    def tied_head(self, x: ir.Value, head: nn.Module) -> ir.Value:
        return super().tied_head(x, head) if isinstance(head, QuantLinear) else self.op("MatMul", [x, self._table])
