"""Reorders a model's channels, which keeps its function but makes the same method round it differently.

Neighbouring channels share a scale, and methods round columns one after the other. Permuting the residual stream
(embedding, norms, their readers, o_proj and down_proj) and each layer's MLP neurons (rows of gate and up, columns of
down) changes nothing in float, but gives new groups and, for some methods, a new order of columns. The spread of the
results shows how much of a difference is chance (`diffbit compare --repeats`). With one scale per row the order does
not matter: plain rounding to int8 is the same in each.

models/mixers/_mixer.py says which of a mixer's weights read the stream: those whose names end in _proj, except o_proj
and `MixerOptions.inner`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..models import ModelConfig
from ..models.checkpoint.names import EMBEDDING, HEAD

Read = Callable[[str], Tensor]  # a parameter of the float model by its name
NORMS = ("input_layernorm", "mixer_output_norm", "post_attention_layernorm", "mlp_output_norm")  # of the stream
MLP_ROWS = ("gate_proj", "up_proj", "ffn_sub_norm")  # the modules that compute, or scale, an MLP's neurons


def reordered(config: ModelConfig, read: Read, order: int) -> Read:
    """Return a `read` of the same model with its channels in order number `order`; 0 is the model's own order."""
    if not order:
        return read
    stream = _permutation(config.hidden_size, order, 0)
    neurons = [  # those of an MLP that replaces the stream are its channels
        _permutation(layer.mlp.intermediate_size, order, 1 + i) if layer.mlp.residual else stream
        for i, layer in enumerate(config.layers)
    ]

    def permuted(name: str) -> Tensor:
        tensor = read(name)
        if name in (EMBEDDING, HEAD):
            return _columns(tensor, stream)
        *path, kind = name.split(".")
        if path[:2] != ["model", "layers"]:
            return tensor[stream.to(tensor.device)]  # the final norm
        module = path[-1]
        if module in NORMS:
            return tensor[stream.to(tensor.device)]
        inner = neurons[int(path[2])]
        rows: Tensor | None = None
        columns: Tensor | None = None
        if path[3] == "mlp":
            rows = inner if module in MLP_ROWS else stream if module == "down_proj" else None
            columns = inner if module == "down_proj" else stream
        elif module.endswith("_proj") and module not in config.layers[int(path[2])].mixer.inner:
            rows, columns = (stream, None) if module == "o_proj" else (None, stream)
        if rows is not None:
            tensor = tensor[rows.to(tensor.device)]
        return tensor if columns is None or kind != "weight" or tensor.dim() < 2 else _columns(tensor, columns)

    return permuted


def _permutation(size: int, order: int, place: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(1000 * order + place))


def _columns(tensor: Tensor, order: Tensor) -> Tensor:
    """Reorder columns in blocks as long as `order`: a KAN's linear reads several functions of each channel."""
    return tensor.unflatten(1, (-1, len(order)))[:, :, order.to(tensor.device)].flatten(1)
