"""Assembles models of quantized layers from their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..formats import Format, QTensor
from ..formats.linear import QuantEmbedding, QuantLinear
from ..io.fields import located
from ..models import Decoder
from ..models.checkpoint.names import stays_float32
from ..models.decoder import check_derived
from .attention import set_attention
from .scheme import EMBEDDING_MODULE, HEAD_MODULE, Scheme

M = TypeVar("M", bound=nn.Module)
Round = Callable[[Tensor, Format, Any], QTensor]  # (weight, format, stats of its input or None)


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
