"""A layer that is being quantized: the embedding, a decoder layer, or the final norm with the head. `assemble` makes
modules of quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..formats import Format, QTensor, QuantLinear, Rounding, spread
from ..formats.linear import QuantEmbedding
from ..io.fields import located
from ..models import Block, Decoder, LayerSpec, ModelConfig, rope_for
from ..models.checkpoint.names import HEAD, stays_float32
from ..models.decoder import check_derived
from ..models.layers.state import Carried
from ..models.mixers import Symmetries
from ..ops.cache import TOKENS
from .attention import set_attention
from .plan import Plan
from .scheme import EMBEDDING_MODULE, HEAD_MODULE, Scheme

MEASURED_ROWS = 8192  # rows of a table on which its output error is measured, spread evenly
TABLE_PART = 1 << 24  # numbers of a table that are rounded, or multiplied, at a time
FINAL_NORM = "model.norm.weight"

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R", Tensor, QTensor)
Round = Callable[[Tensor, Format, Any], QTensor]  # (weight, format, stats of its input or None)


@dataclass
class Layer:
    """Names are full ("model.layers.0.self_attn.q_proj"), rows in canonical order.

    index     -1: the embedding; 0 ... num_layers - 1: a decoder layer; num_layers: the final norm and the head
    formats   {linear layer: Format} of the linear layers to quantize
    tensors   {parameter: float tensor}; a transform replaces them
    refitted  {parameter: float tensor} that methods change in the quantized model only; `tensors` keeps the float
              model's
    """

    plan: Plan
    index: int
    formats: dict[str, Format]
    tensors: dict[str, Tensor]
    refitted: dict[str, Tensor] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.plan.config

    @property
    def is_layer(self) -> bool:
        return 0 <= self.index < self.config.num_layers

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.index}." if self.is_layer else ""

    @property
    def spec(self) -> LayerSpec:
        """Return this decoder layer's part of the model's configuration."""
        return self.config.layers[self.index]

    @property
    def symmetries(self) -> Symmetries:
        """Return the symmetries of this decoder layer at its place in the model."""
        return self.config.symmetries(self.index)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def weight(self, name: str) -> Tensor:
        """Return the weight to round for a linear layer: W, or W H if its input will be x H (formats/rounding.py)."""
        return spread(self.tensors[f"{name}.weight"], self.rounding(name))

    def rounding(self, name: str) -> Rounding | None:
        """Return how the quantized linear layer will round its input."""
        columns = self.tensors[f"{name}.weight"].shape[1]
        return self.formats[name].rounding(name, columns, self.plan.scheme.activations)

    def local(self, name: str) -> str:
        """Return the name of a parameter or linear layer within `module()`."""
        return name.removeprefix(self.prefix).removeprefix("" if self.is_layer else "model.")

    def module(self, quantized: Mapping[str, QTensor] | None = None) -> nn.Module:
        """Return the layer as an fp32 module: float if None, else (also if {}) under its scheme with these weights."""
        with torch.device("meta"):
            module = Block(self.config, self.index) if self.is_layer else _Head(self.config, len(self.tensors[HEAD]))
        tensors = self.tensors if quantized is None else self.tensors | self.refitted
        state = {
            self.local(name): (quantized or {}).get(name.removesuffix(".weight"), tensor)
            for name, tensor in tensors.items()
        }
        return assemble(module, state, Scheme() if quantized is None else self.plan.scheme, torch.float32)

    def probe(self) -> Layer:
        """Return this layer, with only MEASURED_ROWS rows of a large head; its input is the same."""
        if self.is_layer:
            return self
        return replace(self, tensors=self.tensors | {HEAD: _sample(self.tensors[HEAD])})

    def probed(self, quantized: Mapping[str, QTensor]) -> Mapping[str, QTensor]:
        """Return the rows of quantized weights that `probe` has."""
        return quantized if self.is_layer else {name: _sample(weight) for name, weight in quantized.items()}

    def stand_in(self, tokens: int) -> Carried:
        """Return random tensors in place of those that this layer reads from another, for a sequence of `tokens`."""
        mixer, generator = self.spec.mixer, torch.Generator().manual_seed(0)
        if mixer.reads is None:
            return {}
        shapes = ([tokens if dim == TOKENS else int(dim) for dim in shape] for shape in mixer.carried)
        return {mixer.reads: tuple(torch.randn(1, *shape, generator=generator).to(self.device) for shape in shapes)}

    @torch.no_grad()
    def stages(self) -> list[list[str]]:
        """Group the linear layers in `formats` by their input tensor, in the order of computation.

        In a decoder layer: q, k and v; o; gate and up; down. The groups are found by passing one token.
        """
        module = self.probe().module()
        readers: dict[int, tuple[Tensor, list[str]]] = {}  # keeps the tensors, so that no id is reused

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _, inputs: readers.setdefault(id(inputs[0]), (inputs[0], []))[1].append(name)

        for name in self.formats:
            module.get_submodule(name.removeprefix(self.prefix)).register_forward_pre_hook(hook(name))
        rope = rope_for(self.config, torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        token = torch.ones(1, 1, self.config.hidden_size, device=self.device)
        module(token, rope, None, None, self.stand_in(1)) if self.is_layer else module(token)
        return [names for _, names in readers.values()]


class _Head(nn.Module):
    """The final norm and the head, or some of its rows: x [n, S, E] -> logits [n, S, rows]."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.norm = config.new_norm()
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def _sample(weight: R) -> R:
    """Return MEASURED_ROWS evenly spread rows of a larger table, a tensor or a QTensor."""
    count = weight.shape[0]
    rows = torch.arange(MEASURED_ROWS) * count // MEASURED_ROWS
    if count <= MEASURED_ROWS:
        return weight
    return weight.rows(rows) if isinstance(weight, QTensor) else weight[rows]


def table_rows(columns: int) -> int:
    """Return how many rows of a table are processed at a time."""
    return max(1, TABLE_PART // columns)


def with_float_weights(module: nn.Module) -> nn.Module:
    """Replace quantized layers by float ones where results stay bit-identical, to dequantize once, not per batch."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, QuantLinear) and linear.rounding is None:
            with torch.device("meta"):
                plain = nn.Linear(linear.in_features, linear.out_features, bias=False)
            plain.weight = nn.Parameter(linear.weight.dequantize(), requires_grad=False)
            plain.register_parameter("bias", linear.bias)
            module.set_submodule(name, plain)
    return module


def assemble(module: M, weights: Mapping[str, Tensor | QTensor], scheme: Scheme, dtype: torch.dtype | None) -> M:
    """Put weights, by name, into a decoder or block made on the meta device; floats as `dtype` (None: unchanged)."""
    state = {}
    for name, weight in weights.items():
        if isinstance(weight, QTensor):
            place = name.removesuffix(".weight")
            if place != EMBEDDING_MODULE:
                replaced = module.get_submodule(place)
                assert isinstance(replaced, nn.Linear)
                module.set_submodule(place, quant_linear(place, weight, scheme, replaced.bias))
                continue
            floats = dtype or next(other.dtype for other in weights.values() if isinstance(other, Tensor))
            module.set_submodule(place, QuantEmbedding(weight, floats))
            if isinstance(module, Decoder) and module.config.tie_embeddings:  # the head multiplies by the same QTensor
                module.lm_head = quant_linear(HEAD_MODULE, weight, scheme)
        else:
            state[name] = weight if dtype is None else weight.to(torch.float32 if stays_float32(name) else dtype)
    module.load_state_dict(state, strict=True, assign=True)
    check_derived(module)
    set_attention(module, scheme.attention)
    return module


def quant_linear(module: str, weight: QTensor, scheme: Scheme, bias: nn.Parameter | None = None) -> QuantLinear:
    """Return the linear layer of a quantized weight, with its input rounded as the scheme says, and a float bias."""
    return QuantLinear(weight, weight.format.rounding(module, weight.shape[1], scheme.activations), bias)


def quantize_weight(method: Round, name: str, weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """Return method(weight, format, stats); errors name the weight."""
    with located(name):
        return method(weight.detach(), format, stats)


def as_exported(module: nn.Module, target: str = "cpu") -> None:
    """Make a model's quantized linear layers round their inputs as the artifact's operators do.

    Those for CPUs and CUDA round whatever the scheme says about activations: `Format.device_rounding`. Those for WebGPU
    have float inputs.
    """
    for part in module.modules():
        if isinstance(part, QuantLinear):
            part.rounding = None if target == "webgpu" else part.weight.format.device_rounding(part.rounding)
