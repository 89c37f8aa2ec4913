"""Rotation within the heads of attention: the part of rotate that needs no other embedding or head (arXiv 2404.00456).

The model computes the same, and nothing is added at run time or in the file:

  values            v -> v Q, Q [w, w] a randomised Hadamard transform (hadamard.py), one per kv head: Q^T W_v, W_o Q.
                    In diff_v1 w is 2d: the difference (A1 - lambda A2) v and the head norm, which has no weight, let
                    it pass exactly.
  queries, keys     RoPE turns rows j and j + d/2 of a sub-head as a pair, so that such a pair may be turned by any one
                    angle in a key sub-head and in the query sub-heads that meet it: each plane of the signal's and of
                    the noise's has its own, the one of ANGLES with the least error of rounding to nearest,
                    sum over the queries of  ||dq||^2 ||k||^2 + ||q||^2 ||dk||^2.
                    A norm of queries and keys (Qwen 3) scales both rows apart: they stay as they are, and so do keys
                    and values that another layer reads, and that layer's queries.

Biases turn with the rows that they are added to.

No scales between queries and keys: a format has scales for each row, so that a row times s rounds to s times the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...models import ModelConfig
from ...models.mixer import Symmetries
from ..folding import change_rows, unchanged
from ..formats import Format
from ..hadamard import Rotation
from ..layer import Layer

CALIBRATED = False
SEED = 0
ANGLES = tuple(i * math.pi / 32 for i in range(16))  # a quarter turn swaps the rows and changes no error


def warning(config: ModelConfig) -> str | None:
    kept = [str(index) for index in range(config.num_layers) if config.symmetries(index) == Symmetries()]
    if not kept:
        return None
    return f"heads are not rotated in layers {', '.join(kept)}: they have none, or share them with other layers"


def transform(layer: Layer) -> None:
    if layer.is_layer:
        with unchanged(layer):
            for name, tensor in layer.tensors.items():
                layer.tensors[name] = tensor.double()  # rounded once, after both
            rotate_values(layer)
            turn_planes(layer)


def rotate_values(layer: Layer) -> None:
    """W_v -> Q^T W_v and W_o -> W_o Q, a Q for each kv head and the heads that share it."""
    width = layer.symmetries.value_width
    if not width:
        return
    v_proj, o_proj = (f"{layer.prefix}self_attn.{name}_proj.weight" for name in "vo")
    outputs, count = layer.tensors[o_proj].split(width, dim=1), len(layer.tensors[v_proj]) // width
    shared = len(outputs) // count
    seed = SEED + 1 + layer.index * count
    rotations = [Rotation(width, seed + group) for group in range(count)]  # each its own signs

    def rotated(rows: Tensor) -> Tensor:
        return torch.cat([r.left_inverse(v) for r, v in zip(rotations, rows.split(width), strict=True)])

    change_rows(layer, v_proj, rotated)
    layer.tensors[o_proj] = torch.cat([rotations[i // shared].right(o) for i, o in enumerate(outputs)], dim=1)


def turn_planes(layer: Layer) -> None:
    """Rows j and j + d/2 of each sub-head of q_proj and k_proj, by an angle for each plane of each key sub-head."""
    modules = [f"{layer.prefix}self_attn.{name}_proj" for name in "qk"]
    formats = [layer.formats.get(module) for module in modules]
    meets = layer.symmetries.key_of
    if not meets or formats == [None, None]:
        return
    weight = layer.tensors[f"{modules[0]}.weight"]
    width, device = len(weight) // len(meets), weight.device
    query, key = (layer.tensors[f"{module}.weight"].unflatten(0, (-1, 2, width // 2)) for module in modules)
    key_of = torch.tensor(meets, device=device)

    def shared(values: Tensor) -> Tensor:  # [query sub-heads, d/2] -> [key sub-heads, d/2]
        return values.new_zeros(len(key), width // 2).index_add_(0, key_of, values)

    query_energy, key_energy = (weight.square().sum((1, 3)) for weight in (query, key))
    losses = []
    for angle in ANGLES:
        angles = torch.full((len(key), width // 2), angle, device=device)
        query_error, key_error = (
            _plane_error(_turn(weight, turned), format)
            for weight, turned, format in zip((query, key), (angles[key_of], angles), formats, strict=True)
        )
        losses.append(shared(query_error) * key_energy + key_error * shared(query_energy))
    best = torch.tensor(ANGLES, device=device)[torch.stack(losses).argmin(0)]
    for module, turned in zip(modules, (best[key_of], best), strict=True):

        def turn(rows: Tensor, turned: Tensor = turned) -> Tensor:
            return _turn(rows.unflatten(0, (-1, 2, width // 2)), turned).flatten(0, 2)

        change_rows(layer, f"{module}.weight", turn)


def _turn(weight: Tensor, angle: Tensor) -> Tensor:
    """weight [heads, 2, d/2, K], angle [heads, d/2]."""
    cos, sin = angle.double().cos()[..., None], angle.double().sin()[..., None]
    low, high = weight.unbind(1)
    return torch.stack((cos * low - sin * high, sin * low + cos * high), dim=1)


def _plane_error(weight: Tensor, format: Format | None) -> Tensor:
    """[heads, 2, d/2, K] -> [heads, d/2], the squared error of rounding to nearest; none where it stays float."""
    if format is None:
        return weight.new_zeros(weight.shape[0], weight.shape[2])
    rows = weight.flatten(0, 2).float()
    error = format.nearest(rows, *format.fit(rows)).dequantize() - rows
    return error.square().sum(1).unflatten(0, weight.shape[:3]).sum(1).to(weight.dtype)
