"""DiffAttention with other scores or weights: a body (ops/diff_attention_body.py) that a variant inherits from.

It has no kernel. Caches of all formats and windows work; they are never written in place, so a call returns a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....ops import body, diff_attention_body

if TYPE_CHECKING:
    import onnx_ir


@dataclass(frozen=True)
class Changed:
    """What Graph.attention takes in place of the module. inputs: names of those that follow DiffAttention's."""

    name: str
    inputs: tuple[str, ...]
    kind: type[diff_attention_body.AttentionBody]

    @property
    def OP(self) -> Any:
        return replace(diff_attention_body.OP, name=self.name)

    def function(self, signature: diff_attention_body.Signature, grouped: bool, name: str) -> onnx_ir.Function:
        """Return the body as an ONNX model-local function."""

        def write(op: body.Nodes) -> list[body.Value]:
            outputs = self.kind(signature, op).outputs
            return [outputs[name] for name in signature.declared_outputs]

        inputs = diff_attention_body.INPUTS[: len(signature.inputs)] + self.inputs
        return diff_attention_body.OP.function(write, inputs, signature.declared_outputs, name)
