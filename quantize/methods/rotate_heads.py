"""Rotates within the heads of attention: the part of rotate that leaves embedding and head alone (arXiv 2404.00456).

It does not change the model's function, and adds nothing at run time or to the file:

  values            v -> v Q, Q [w, w] a randomised Hadamard transform (_rotation.py), one per kv head: Q^T W_v, W_o Q.
                    In diff_v1 w is 2d: Q passes exactly through the difference (A1 - lambda A2) v and through the head
                    norm, which has no weight.
  queries, keys     RoPE rotates rows j and j + d/2 of a sub-head as a pair. So the pair may be rotated by any angle, if
                    a key sub-head and the query sub-heads that use it share the angle. Each plane of the signal's and
                    the noise's key sub-heads gets the one of ANGLES with the least error of rounding to nearest,
                    sum over the queries of  ||dq||^2 ||k||^2 + ||q||^2 ||dk||^2.
                    Not rotated: queries and keys with a norm (Qwen 3), which scales the two rows differently; keys
                    and values that another layer reads; that layer's queries.

Biases are rotated with their rows.

Scales between queries and keys would be useless: formats have scales per row, so s times a row rounds to s times the
same result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...formats import Format
from ...models import ModelConfig
from ...models.mixers import Symmetries
from ..calibration.passes import Passes
from ..layer import Layer
from . import Method
from ._folding import change_rows, unchanged
from ._rotation import Rotation

SEED = 0
ANGLES = tuple(i * math.pi / 32 for i in range(16))  # below a quarter turn, which swaps the rows and keeps the error


def warning(config: ModelConfig) -> str | None:
    unchanged = [str(index) for index in range(config.num_layers) if config.symmetries(index) == Symmetries()]
    if not unchanged:
        return None
    return f"layers {', '.join(unchanged)} are not rotated: they have no heads, or share them with other layers"


def transform(layer: Layer, passes: Passes) -> None:
    if layer.is_layer:
        with unchanged(layer):
            for name, tensor in layer.tensors.items():
                layer.tensors[name] = tensor.double()  # converted back once, after both
            rotate_values(layer)
            turn_planes(layer)


def rotate_values(layer: Layer) -> None:
    """Replace W_v by Q^T W_v and W_o by W_o Q, with one Q for each kv head and the heads that share it."""
    width = layer.symmetries.value_width
    if not width:
        return
    v_proj, o_proj = (f"{layer.prefix}self_attn.{name}_proj.weight" for name in "vo")
    outputs, count = layer.tensors[o_proj].split(width, dim=1), len(layer.tensors[v_proj]) // width
    shared = len(outputs) // count
    seed = SEED + 1 + layer.index * count
    rotations = [Rotation(width, seed + group) for group in range(count)]  # with different signs

    def rotated(rows: Tensor) -> Tensor:
        return torch.cat([r.left_inverse(v) for r, v in zip(rotations, rows.split(width), strict=True)])

    change_rows(layer, v_proj, rotated)
    layer.tensors[o_proj] = torch.cat([rotations[i // shared].right(o) for i, o in enumerate(outputs)], dim=1)


def turn_planes(layer: Layer) -> None:
    """Rotate rows j and j + d/2 of q_proj's and k_proj's sub-heads, by an angle per plane of each key sub-head."""
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
    """Rotate the planes of weight [heads, 2, d/2, K] by angle [heads, d/2]."""
    cos, sin = angle.double().cos()[..., None], angle.double().sin()[..., None]
    low, high = weight.unbind(1)
    return torch.stack((cos * low - sin * high, sin * low + cos * high), dim=1)


def _plane_error(weight: Tensor, format: Format | None) -> Tensor:
    """Return the squared error [heads, d/2] of rounding [heads, 2, d/2, K] to nearest; 0 if it stays float."""
    if format is None:
        return weight.new_zeros(weight.shape[0], weight.shape[2])
    rows = weight.flatten(0, 2).float()
    error = format.nearest(rows, *format.fit(rows)).dequantize() - rows
    return error.square().sum(1).unflatten(0, weight.shape[:3]).sum(1).to(weight.dtype)


METHOD = Method("rotate_heads", __doc__, transform=transform, warning=warning)
