"""Models of quantized layers, put together from their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import DiffbitError
from ..models.checkpoint.names import stays_float32
from ..models.mixer import check_derived
from .attention import set_attention
from .formats import Format, QTensor
from .linear import QuantLinear
from .scheme import Scheme

M = TypeVar("M", bound=nn.Module)
Method = Callable[[Tensor, Format, Any], QTensor]  # (weight, format, stats of its input or None)


def assemble(module: M, weights: Mapping[str, Tensor | QTensor], scheme: Scheme, dtype: torch.dtype | None) -> M:
    """Give a decoder or block made on the meta device its weights by name, floats as `dtype` (None: as they are)."""
    state = {}
    for name, weight in weights.items():
        if isinstance(weight, QTensor):
            linear = name.removesuffix(".weight")
            rounding = weight.format.rounding(linear, weight.shape[1], scheme.activations)
            replaced = module.get_submodule(linear)
            assert isinstance(replaced, nn.Linear)
            module.set_submodule(linear, QuantLinear(weight, rounding, replaced.bias))  # its bias is loaded below
        else:
            state[name] = weight if dtype is None else weight.to(torch.float32 if stays_float32(name) else dtype)
    module.load_state_dict(state, strict=True, assign=True)
    check_derived(module)
    set_attention(module, scheme.attention)
    return module


def quantize_weight(method: Method, name: str, weight: Tensor, format: Format, stats: Any = None) -> QTensor:
    """method(weight, format, stats), its errors told with the weight's name."""
    try:
        return method(weight.detach(), format, stats)
    except DiffbitError as error:
        raise DiffbitError(f"{name}: {error}") from None
