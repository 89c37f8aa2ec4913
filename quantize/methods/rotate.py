"""Rotation: the model with other coordinates, in which no channel stands out (QuaRot, arXiv 2404.00456; 2405.16406).

Only rotations that fold into the weights, so that they are free at run time and the model computes the same:

  residual stream   h -> h R, R [E, E] a randomised Hadamard transform (hadamard.py). RMSNorm commutes with R once its
                    weight g is folded into the layers that follow: embedding E R, readers W diag(g) R, o_proj and
                    down_proj R^T W, the final norm and the head likewise.
  values            v -> v Q, Q [w, w] one per kv head: Q^T W_v, W_o Q. In diff_v1 w is 2d: the difference
                    (A1 - lambda A2) v and the head norm, which has no weight, let it pass exactly.

A tied head is untied, since the final norm's weight goes into the head and not into the embedding: a tie survives only
an R that mixes no two channels of different g, in a trained model none.

awq and smooth may follow and must not precede: folding the norms would undo their scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...models import ModelConfig
from ...models.attention import symmetries
from ...models.layout import EMBEDDING, HEAD
from ..folding import attention_readers, mlp_readers, unchanged
from ..hadamard import Rotation
from ..piece import FINAL_NORM, Piece

CALIBRATED = False
SEED = 0


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
            _rotate_values(piece)
            _read_rotated(piece, f"{piece.prefix}input_layernorm.weight", attention_readers(piece), stream)
            _read_rotated(piece, f"{piece.prefix}post_attention_layernorm.weight", mlp_readers(piece), stream)
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                tensors[piece.prefix + name] = stream.left_inverse(tensors[piece.prefix + name])
        else:
            _read_rotated(piece, FINAL_NORM, [HEAD], stream)


def _read_rotated(piece: Piece, norm: str, readers: list[str], stream: Rotation) -> None:
    """W -> W diag(g) R of every weight that reads a norm, whose own weight g becomes 1."""
    for name in readers:
        piece.tensors[name] = stream.right(piece.tensors[name].double() * piece.tensors[norm].double())
    piece.tensors[norm] = torch.ones_like(piece.tensors[norm])


def _rotate_values(piece: Piece) -> None:
    """W_v -> Q^T W_v and W_o -> W_o Q, a Q for each kv head and the heads that share it."""
    width = symmetries(piece.config).value_width
    if not width:
        return
    v_proj, o_proj = (f"{piece.prefix}self_attn.{name}_proj.weight" for name in "vo")
    values, outputs = piece.tensors[v_proj].split(width), piece.tensors[o_proj].split(width, dim=1)
    shared = len(outputs) // len(values)
    rotations = [
        Rotation(width, SEED + 1 + piece.index * len(values) + group)  # each its own signs
        for group in range(len(values))
    ]
    piece.tensors[v_proj] = torch.cat([r.left_inverse(v) for r, v in zip(rotations, values, strict=True)])
    piece.tensors[o_proj] = torch.cat([rotations[i // shared].right(o) for i, o in enumerate(outputs)], dim=1)
