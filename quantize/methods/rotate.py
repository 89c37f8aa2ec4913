"""Rotates the model's activations so that no channel stands out (QuaRot, arXiv 2404.00456; 2405.16406).

It uses only rotations that fold into the weights, so they are free at run time and do not change the model's function:

  residual stream   h -> h R, R [E, E] a randomised Hadamard transform (_rotation.py). RMSNorm commutes with R once its
                    weight g is folded into the layers that follow: embedding E R, readers W diag(g) R, o_proj and
                    down_proj R^T W and R^T b of their biases, the final norm and the head likewise.
  heads             values, and queries with keys: rotate_heads.py

LayerNorm commutes with an R that keeps the mean. Its weight folds in the same way, and its bias b becomes (b / g) R; a
model with a g near 0 is refused.

A tied head is untied, which costs its bytes, because the final norm's weight is folded into the head but not into the
embedding. The two could stay tied only if R mixed no channels of different g, which no rotation of a trained model
does. rotate_heads keeps them tied.

awq may follow but not precede it, because folding the norms would undo awq's scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...io.errors import DiffbitError
from ...models import ModelConfig
from ...models.checkpoint import EMBEDDING, HEAD
from ..calibration.passes import Passes
from ..layer import FINAL_NORM, Layer
from . import Method
from ._folding import attention_readers, change_rows, mlp_readers, unchanged
from ._rotation import Rotation
from .rotate_heads import SEED, rotate_values, turn_planes, warning

MOST_BIAS = 256  # largest ratio of max|b / g| to max|b| of a LayerNorm; b / g is stored in the bias's dtype


def config(config: ModelConfig) -> ModelConfig:
    """Return the rotated model's config, whose head is untied."""
    return replace(config, tie_embeddings=False)


def transform(layer: Layer, passes: Passes) -> None:
    if layer.is_layer and layer.spec.norms != "before":
        raise DiffbitError(
            f"{layer.prefix[:-1]}: has norms after its mixer and its MLP, whose weights no other weight can take in, "
            "so the residual stream cannot be rotated; use rotate_heads in place of rotate"
        )
    if layer.is_layer and not layer.spec.mlp.scalable:
        raise DiffbitError(
            f"{layer.prefix[:-1]}: its MLP ({layer.spec.mlp.name}) computes functions of single channels of the "
            "residual stream, so the stream cannot be rotated; use rotate_heads in place of rotate"
        )
    stream = Rotation(layer.config.hidden_size, SEED, keeps_mean=layer.config.norm == "layer")
    tensors = layer.tensors
    with unchanged(layer, stream):
        if layer.index < 0:
            tensors[EMBEDDING] = stream.right(tensors[EMBEDDING])
        elif layer.is_layer:
            for name, tensor in tensors.items():
                tensors[name] = tensor.double()  # converted back once, at the end
            rotate_values(layer)
            _read_rotated(layer, f"{layer.prefix}input_layernorm.weight", attention_readers(layer), stream)
            _read_rotated(layer, f"{layer.prefix}post_attention_layernorm.weight", mlp_readers(layer), stream)
            turn_planes(layer)
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                change_rows(layer, layer.prefix + name, stream.left_inverse)
        else:
            _read_rotated(layer, FINAL_NORM, [HEAD], stream)


def _read_rotated(layer: Layer, norm: str, readers: list[str], stream: Rotation) -> None:
    """Replace every weight W that reads a norm by W diag(g) R, and the norm's weight g by 1."""
    weight, bias = layer.tensors[norm].double(), f"{norm.removesuffix('.weight')}.bias"
    for name in readers:
        layer.tensors[name] = stream.right(layer.tensors[name], weight)
    layer.tensors[norm] = torch.ones_like(layer.tensors[norm])
    if bias in layer.tensors:
        moved = (layer.tensors[bias].double() / weight).nan_to_num(nan=0.0)  # 0 / 0
        if moved.abs().max() > MOST_BIAS * layer.tensors[bias].abs().max():
            raise DiffbitError(
                f"{norm}: holds numbers near 0, so that the norm's bias cannot be rotated; use rotate_heads in place "
                "of rotate"
            )
        layer.tensors[bias] = stream.right(moved[None])[0]


METHOD = Method("rotate", __doc__, transform=transform, config=config, warning=warning)
