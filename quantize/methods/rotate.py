"""Rotation: the model with other coordinates, in which no channel stands out (QuaRot, arXiv 2404.00456; 2405.16406).

Only rotations that fold into the weights, so that they are free at run time and the model computes the same:

  residual stream   h -> h R, R [E, E] a randomised Hadamard transform (hadamard.py). RMSNorm commutes with R once its
                    weight g is folded into the layers that follow: embedding E R, readers W diag(g) R, o_proj and
                    down_proj R^T W and R^T b of their biases, the final norm and the head likewise.
  heads             values, and queries with keys: rotate_heads.py

LayerNorm commutes with an R that keeps the mean (hadamard.py). Its weight folds likewise, and its bias b becomes
(b / g) R, which a g near 0 does not allow: such a model is refused.

A tied head is untied, which costs its bytes: the final norm's weight goes into the head and not into the embedding. A
tie survives only an R that mixes no two channels of different g, in a trained model none. rotate_heads alone keeps it.

awq may follow and must not precede: folding the norms would undo their scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import DiffbitError
from ...models import ModelConfig
from ...models.checkpoint.names import EMBEDDING, HEAD
from ..folding import attention_readers, change_rows, mlp_readers, unchanged
from ..hadamard import Rotation
from ..layer import FINAL_NORM, Layer
from .rotate_heads import SEED, rotate_values, turn_planes, warning

__all__ = ["CALIBRATED", "config", "transform", "warning"]
CALIBRATED = False
MOST_BIAS = 256  # a LayerNorm's bias over its weight, to its bias: the quotient is stored in the bias's dtype


def config(config: ModelConfig) -> ModelConfig:
    """The rotated model's: a head of its own."""
    return replace(config, tie_embeddings=False)


def transform(layer: Layer) -> None:
    stream = Rotation(layer.config.hidden_size, SEED, keeps_mean=layer.config.norm == "layer")
    tensors = layer.tensors
    with unchanged(layer, stream):
        if layer.index < 0:
            tensors[EMBEDDING] = stream.right(tensors[EMBEDDING])
        elif layer.is_layer:
            for name, tensor in tensors.items():
                tensors[name] = tensor.double()  # rounded once, after all that follows
            rotate_values(layer)
            _read_rotated(layer, f"{layer.prefix}input_layernorm.weight", attention_readers(layer), stream)
            _read_rotated(layer, f"{layer.prefix}post_attention_layernorm.weight", mlp_readers(layer), stream)
            turn_planes(layer)
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                change_rows(layer, layer.prefix + name, stream.left_inverse)
        else:
            _read_rotated(layer, FINAL_NORM, [HEAD], stream)


def _read_rotated(layer: Layer, norm: str, readers: list[str], stream: Rotation) -> None:
    """W -> W diag(g) R of every weight that reads a norm, whose own weight g becomes 1."""
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
