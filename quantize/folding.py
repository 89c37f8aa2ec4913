"""Changes of a piece's weights that cancel out: what the methods that run before rounding share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import DiffbitError
from ..models import causal_mask, rope_for
from .hadamard import Rotation
from .piece import Piece

PROBE_TOKENS = 8
PROBE_ERROR = 1e-3  # fp32 arithmetic stays a hundred times below; a change that does not cancel is as far above


@contextmanager
def unchanged(piece: Piece, stream: Rotation | None = None) -> Iterator[None]:
    """What is done to `piece.tensors` inside, in any float dtype, must leave the piece computing the same.

    Inside, put new tensors in, change none in place: they belong to others. Afterwards they have the dtype they had, or
    fp32 if that was less. A layer is tried out on random hidden states, which `stream` rotates: an attention variant
    that these changes do not fit is refused, whatever its file says.
    """
    before = dict(piece.tensors)
    yield
    if piece.is_layer:
        hidden = torch.randn(1, PROBE_TOKENS, piece.config.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(next(iter(before.values())).device)
        wanted = _probe(piece, before, hidden)
        found = _probe(piece, piece.tensors, hidden, stream)
        error = float((found - wanted).norm() / (wanted - hidden).norm().clamp(min=1e-30))
        if not error <= PROBE_ERROR:
            raise DiffbitError(
                f"{piece.prefix}: with its weights rotated or scaled, attention {piece.config.attention!r} computes "
                f"something else (by {error:.1%}); leave rotate, awq and smooth out, or correct what the variant says "
                "of its symmetries"
            )
    for name, tensor in piece.tensors.items():
        if tensor is not before[name]:
            piece.tensors[name] = tensor.to(torch.promote_types(before[name].dtype, torch.float32))


@torch.inference_mode()
def _probe(piece: Piece, tensors: dict[str, Tensor], hidden: Tensor, stream: Rotation | None = None) -> Tensor:
    """hidden [1, T, E] -> [1, T, E] through the layer with these tensors, whose residual stream is x R."""
    layer = Piece(piece.config, piece.index, piece.scheme, {}, tensors).module()
    rope, mask = (
        rope_for(piece.config, torch.arange(PROBE_TOKENS, device=hidden.device)[None]),
        causal_mask(PROBE_TOKENS),
    )
    if stream is None:
        return layer(hidden, rope, mask).float()
    return stream.right_inverse(layer(stream.right(hidden[0]).float()[None], rope, mask)[0])[None].float()


def attention_readers(piece: Piece) -> list[str]:
    """Weights of a layer's attention that its normed input is multiplied with: all but o_proj's."""
    start = f"{piece.prefix}self_attn."
    return [
        name
        for name in piece.tensors
        if name.startswith(start) and name.endswith("_proj.weight") and name != f"{start}o_proj.weight"
    ]


def mlp_readers(piece: Piece) -> list[str]:
    """The same of the MLP."""
    return [f"{piece.prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
