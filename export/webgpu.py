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
from ..formats.base import MICROSOFT, Blocks
from .grouped import GroupedGraph


class WebGPUGraph(GroupedGraph):
    """Builds the graph as its base class does, with other nodes for weights and the table."""

    _blocks: Blocks  # of a tied quantized table

    def low_bit_product(self, x: ir.Value, module: QuantLinear, factor: float) -> ir.Value:
        blocks = module.weight.format.blocks(module.weight)
        return blocks.multiply(self, x, blocks.store(self, factor), 0)

    def stacked_linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> ir.Value | None:
        """Stack three linear layers or more, but not two: their two products take no more dispatches than a product
        and a Split, and ONNX Runtime makes one node of the norm before them, gate, up and the activation
        (MatMulNBitsMlpFusion)."""
        return None if len(modules) == 2 else super().stacked_linears(x, modules)

    def gather_low_bit(self, table: QTensor) -> ir.Value:
        self._blocks = blocks = table.format.blocks(table)
        self._weight = codes, scale, zero = blocks.store(self)
        inputs = [codes, self.input_ids, self.op("Unsqueeze", [scale, self.const([-1])])]
        columns = blocks.codes.shape[1]
        if zero is not None:
            inputs.append(self.op("Unsqueeze", [zero, self.const([-1])]))
        rows = self.op(
            "GatherBlockQuantized",
            inputs,
            domain=MICROSOFT,
            bits=blocks.bits,
            block_size=blocks.size,
            gather_axis=0,
            quantize_axis=2,
        )  # [B, S, blocks, size]
        rows = self.op("Reshape", [rows, self.const([0, 0, -1])])
        if columns % blocks.size:
            rows = self.op("Slice", [rows, self.const([0]), self.const([columns]), self.const([2])])
        return rows

    def embed(self, table: Tensor | QTensor) -> None:
        """Add the embedding [V, E]. A tied float table is stored as MatMul reads it, [E, V]."""
        if isinstance(table, QTensor) or not self.config.tie_embeddings:
            return super().embed(table if isinstance(table, QTensor) else table.float())
        self._table = self.weight("embed_tokens.weight", table.float().T.numpy())
        columns = self.op("Gather", [self._table, self.input_ids], axis=1)  # [E, B, S]
        self._x = self.op("Transpose", [columns], perm=[1, 2, 0])

    def tied_head(self, x: ir.Value, head: nn.Module) -> ir.Value:
        if isinstance(head, QuantLinear):
            return self._blocks.multiply(self, x, self._weight, 0)
        return self.op("MatMul", [x, self._table])
