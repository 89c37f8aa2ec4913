"""The gated MLP (arXiv 2002.05202, eq. 6), with a norm before down_proj in layers with sub-norms:

    y = down_proj(ffn_sub_norm(act(gate_proj(x)) * up_proj(x)))

An MLP is one file in models/mlp/. A gated one says what `act` is; another kind defines its module, whose linears have
the names up_proj and down_proj (and gate_proj).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from torch import Tensor, nn

from ...io.fields import bounds, check
from ..graph import Graph, Value
from ..mixers import Place


@dataclass(frozen=True)
class MLPOptions(ABC):
    """intermediate_size: rows of gate_proj and up_proj. bias: whether the three linears have one."""

    intermediate_size: Annotated[int, bounds(1, 1 << 22)]
    bias: bool = field(default=False, kw_only=True)

    scalable: ClassVar[bool] = (
        True  # only linears read x, and the output is linear in up_proj's: methods may scale both
    )
    residual: ClassVar[bool] = True  # its output is added to the residual stream; False: replaces it
    elementwise: ClassVar[int] = 0  # operations per token for each of the intermediate_size channels, without linears

    def __post_init__(self) -> None:
        check(self)

    @property
    def name(self) -> str:
        """The name of the MLP's file."""
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    def of_size(cls, hidden_size: int, intermediate_size: int, bias: bool) -> MLPOptions:
        """Return the options for a model of these sizes."""
        return cls(intermediate_size, bias=bias)

    def operations(self, hidden_size: int) -> int:
        """Return the operations per token without the linears."""
        return self.elementwise * self.intermediate_size

    @abstractmethod
    def module(self, place: Place) -> MLP: ...


class MLP(nn.Module):
    """forward: x [B, S, E] -> [B, S, E]."""

    def onnx(self, g: Graph, x: Value) -> Value:
        """Add `forward` as ONNX nodes."""
        raise NotImplementedError


class GatedMLP(MLP):
    wide = False  # act(gate) * up may overflow float16, so a float16 graph computes it in float32

    def __init__(self, options: MLPOptions, place: Place) -> None:
        super().__init__()
        hidden, inner, bias = place.hidden_size, options.intermediate_size, options.bias
        self.gate_proj: nn.Module = nn.Linear(hidden, inner, bias=bias)
        self.up_proj: nn.Module = nn.Linear(hidden, inner, bias=bias)
        self.ffn_sub_norm = place.sub_norm(options.intermediate_size)
        self.down_proj: nn.Module = nn.Linear(inner, hidden, bias=bias)

    def act(self, gate: Tensor) -> Tensor:
        """Map gate_proj's output [B, S, F] to the factor of up_proj's output."""
        raise NotImplementedError

    def onnx_act(self, g: Graph, gate: Value) -> Value:
        """Add `act` as ONNX nodes; in float32 if the MLP is `wide`."""
        raise NotImplementedError

    def onnx_gated(self, g: Graph, x: Value, linears: Mapping[str, nn.Module], raised: bool) -> Value:
        """Add act(gate) * up of the two linears as ONNX nodes; raised: in float32, whatever the graph's dtype."""
        gate, up = g.linears(x, linears)
        if raised:
            gate, up = g.cast(gate, np.float32), g.cast(up, np.float32)
        return g.op("Mul", [self.onnx_act(g, gate), up])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.ffn_sub_norm(hidden))

    def onnx(self, g: Graph, x: Value) -> Value:
        """Add `forward` as ONNX nodes. If the MLP is `wide`, so is the norm, which makes numbers small again."""
        raised = self.wide and g.dtype is not np.float32
        hidden = self.onnx_gated(g, x, {"gate_proj": self.gate_proj, "up_proj": self.up_proj}, raised)
        hidden = g.norm(hidden, self.ffn_sub_norm, "ffn_sub_norm", np.float32 if raised else None)
        return g.linear(g.cast(hidden, g.dtype) if raised else hidden, self.down_proj, "down_proj")
