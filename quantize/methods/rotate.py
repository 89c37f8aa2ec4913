"""Rotation: the model with other coordinates, in which no channel stands out (QuaRot, arXiv 2404.00456; 2405.16406).

Only rotations that fold into the weights, so that they are free at run time and the model computes the same:

  residual stream   h -> h R, R [E, E] a randomised Hadamard transform (hadamard.py). RMSNorm commutes with R once its
                    weight g is folded into the layers that follow: embedding E R, readers W diag(g) R, o_proj and
                    down_proj R^T W, the final norm and the head likewise.
  heads             values, and queries with keys: rotate_heads.py

A tied head is untied, which costs its bytes: the final norm's weight goes into the head and not into the embedding. A
tie survives only an R that mixes no two channels of different g, in a trained model none. rotate_heads alone keeps it.

awq may follow and must not precede: folding the norms would undo their scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...models import ModelConfig
from ...models.layout import EMBEDDING, HEAD
from ..folding import attention_readers, mlp_readers, unchanged
from ..hadamard import Rotation
from ..piece import FINAL_NORM, Piece
from .rotate_heads import SEED, rotate_values, turn_planes

CALIBRATED = False


def config(config: ModelConfig) -> ModelConfig:
    """The rotated model's: a head of its own."""
    return replace(config, tie_embeddings=False)


def transform(piece: Piece) -> None:
    stream = Rotation(piece.config.hidden_size, SEED)
    tensors = piece.tensors
    with unchanged(piece, stream):
        if piece.index < 0:
            tensors[EMBEDDING] = stream.right(tensors[EMBEDDING])
        elif piece.is_layer:
            for name, tensor in tensors.items():
                tensors[name] = tensor.double()  # rounded once, after all that follows
            rotate_values(piece)
            _read_rotated(piece, f"{piece.prefix}input_layernorm.weight", attention_readers(piece), stream)
            _read_rotated(piece, f"{piece.prefix}post_attention_layernorm.weight", mlp_readers(piece), stream)
            turn_planes(piece)
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                tensors[piece.prefix + name] = stream.left_inverse(tensors[piece.prefix + name])
        else:
            _read_rotated(piece, FINAL_NORM, [HEAD], stream)


def _read_rotated(piece: Piece, norm: str, readers: list[str], stream: Rotation) -> None:
    """W -> W diag(g) R of every weight that reads a norm, whose own weight g becomes 1."""
    for name in readers:
        piece.tensors[name] = stream.right(piece.tensors[name], piece.tensors[norm].double())
    piece.tensors[norm] = torch.ones_like(piece.tensors[norm])
