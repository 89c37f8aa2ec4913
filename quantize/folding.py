"""Changes of a piece's weights that cancel out: what the methods that run before rounding share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DiffbitError
from ..models import causal_mask, rope_for
from ..models.attention import symmetries
from ..models.layout import HEAD
from .formats import Format
from .hadamard import Rotation
from .piece import FINAL_NORM, Piece

PROBE_TOKENS = 8
PROBE_ERROR = 1e-2  # fp32 arithmetic stays a thousand times below, large attention logits excepted


@contextmanager
def unchanged(piece: Piece, stream: Rotation | None = None) -> Iterator[None]:
    """What is done to `piece.tensors` inside, in any float dtype, must leave the piece computing the same.

    Inside, put new tensors in, change none in place: they belong to others. Those in float64 are fp32 afterwards, where
    the old ones were not float64. A layer is tried out on random hidden states, which `stream` rotates: an attention
    variant that these changes do not fit is refused, whatever its file says.
    """
    before = dict(piece.tensors)
    yield
    if piece.is_layer:
        hidden = torch.randn(1, PROBE_TOKENS, piece.config.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(next(iter(before.values())).device)
        wanted = _probe(piece, before, hidden)
        found = _probe(piece, piece.tensors, hidden, stream)
        error = float((found - wanted).norm() / (wanted - hidden).norm().clamp(min=1e-30))
        if not error <= PROBE_ERROR and wanted.isfinite().all():  # damaged weights are for the formats to tell
            raise DiffbitError(
                f"{piece.prefix[:-1]}: with its weights rotated or scaled, attention {piece.config.attention!r} "
                f"computes something else (by {error:.1%}); leave rotate and awq out, or correct what the "
                "variant says of its symmetries"
            )
    for name, tensor in piece.tensors.items():
        if tensor.dtype == torch.float64 and before[name].dtype != torch.float64:
            piece.tensors[name] = tensor.float()


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
    return stream.right_inverse(layer(stream.right(hidden[0])[None], rope, mask)[0])[None]


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


@dataclass(frozen=True, eq=False)
class Group:
    """Weights that read the same channels, and what makes these: multiply the ones, divide the other, nothing changes.

    maker     the name of a norm's weight [C] or of a linear layer's [C, ...]: row c makes channel c
    readers   names of weights [N, K]
    channels  int64 [K], the channel that each of their columns reads (some read by several: grouped queries)
    """

    maker: str
    readers: tuple[str, ...]
    channels: Tensor


def groups(piece: Piece) -> list[Group]:
    """What of a piece can be scaled, channel by channel, without changing what it computes.

    The norms' weights against the layers behind them, up_proj against down_proj (act(gate) * up is linear in up) and
    v_proj against o_proj where the attention variant lets scales pass and no norm stands between.
    """
    start, tensors = piece.prefix, piece.tensors
    found: list[tuple[str, list[str]]] = []
    if piece.is_layer:
        found.append((f"{start}input_layernorm.weight", attention_readers(piece)))
        found.append((f"{start}post_attention_layernorm.weight", mlp_readers(piece)))
        norm = piece.config.sub_norms  # before down_proj and o_proj
        maker = "mlp.ffn_sub_norm" if norm else "mlp.up_proj"
        found.append((f"{start}{maker}.weight", [f"{start}mlp.down_proj.weight"]))
        if norm:
            found.append((f"{start}self_attn.attn_sub_norm.weight", [f"{start}self_attn.o_proj.weight"]))
        elif symmetries(piece.config).value_scales:
            found.append((f"{start}self_attn.v_proj.weight", [f"{start}self_attn.o_proj.weight"]))
    elif piece.index >= 0 and not piece.config.tie_embeddings:
        found.append((FINAL_NORM, [HEAD]))
    return [Group(maker, tuple(readers), _channels(piece, maker, tensors[readers[0]])) for maker, readers in found]


def _channels(piece: Piece, maker: str, reader: Tensor) -> Tensor:
    """Each column's channel: its own, or that of the value head that its head reads."""
    made, read = len(piece.tensors[maker]), reader.shape[1]
    if made == read:
        return torch.arange(read)
    width = symmetries(piece.config).value_width
    head, place = torch.arange(read) // width, torch.arange(read) % width
    return head // (read // made) * width + place


def scale_groups(piece: Piece, search: Callable[[str, list[Tensor], list[Format], Tensor], Tensor]) -> None:
    """Scale each group that has layers to be rounded by search(the first's name, weights, formats, channels) [C]."""
    with unchanged(piece):
        for group in groups(piece):
            modules = [name.removesuffix(".weight") for name in group.readers]
            modules = [module for module in modules if module in piece.formats]
            weights = [piece.tensors[f"{module}.weight"] for module in modules]
            if weights and all(weight.isfinite().all() for weight in weights):  # else for the format to refuse
                formats = [piece.formats[module] for module in modules]
                fold(piece, group, search(modules[0], weights, formats, group.channels))


def per_channel(values: Tensor, channels: Tensor) -> Tensor:
    """Numbers of columns [K] -> of the channels they read [C]: the mean over those that share one."""
    channels = channels.to(values.device)
    empty = values.new_zeros(int(channels.max()) + 1)
    return empty.scatter_reduce(0, channels, values, "mean", include_self=False)


def fold(piece: Piece, group: Group, scale: Tensor) -> None:
    """Multiply the columns of a group's readers by scale [C] of their channels and divide it out of their maker.

    A norm's weight is divided in its own dtype and the rest follows from the quotient, so that nothing is lost in fp16.
    """
    made = piece.tensors[group.maker]
    scale = scale.double().to(made.device)
    if made.dim() == 1:
        divided = (made.double() / scale).to(made.dtype)
        fits = (divided != 0) & divided.isfinite()
        scale = torch.where(fits, made.double() / divided.double(), 1.0)
        piece.tensors[group.maker] = torch.where(fits, divided, made)
    else:
        piece.tensors[group.maker] = made.double() / scale[:, None]
    for name in group.readers:
        piece.tensors[name] = piece.tensors[name].double() * scale[group.channels.to(scale.device)]
