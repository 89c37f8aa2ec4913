"""Changes of a layer's weights that cancel out: shared code of the methods that run before rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import Format
from ...io.errors import DiffbitError
from ...models import causal_mask, rope_for
from ...models.checkpoint import HEAD
from ..layer import FINAL_NORM, Layer
from ._rotation import Rotation

PROBE_TOKENS = 8
PROBE_ERROR = 1e-2  # fp32 arithmetic stays a thousand times below, large attention logits excepted


@contextmanager
def unchanged(layer: Layer, stream: Rotation | None = None) -> Iterator[None]:
    """Check that changes to `layer.tensors` within this context leave the layer's function unchanged.

    Inside, replace tensors and never modify them in place: others use them too. Tensors in float64 become fp32 at the
    end unless the old ones were float64. The check runs the layer on random hidden states, which `stream` rotates; it
    raises an error if the changes do not fit the attention variant, whatever the variant's file says.
    """
    before = dict(layer.tensors)
    yield
    if layer.is_layer:
        hidden = torch.randn(1, PROBE_TOKENS, layer.config.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(next(iter(before.values())).device)
        expected = _probe(layer, before, hidden)
        outputs = _probe(layer, layer.tensors, hidden, stream)
        errors = [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(outputs, expected, strict=True)]
        error = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        if not error <= PROBE_ERROR and all(part.isfinite().all() for part in expected):  # formats report infinite ones
            raise DiffbitError(
                f"{layer.prefix[:-1]}: rotating or scaling its weights changes the output of "
                f"{layer.spec.mixer.name!r} by {error:.1%}; leave out rotate and awq, or correct the symmetries in its "
                "file"
            )
    for name, tensor in layer.tensors.items():
        if tensor.dtype == torch.float64 and before[name].dtype != torch.float64:
            layer.tensors[name] = tensor.float()


@torch.inference_mode()
def _probe(
    layer: Layer, tensors: dict[str, Tensor], hidden: Tensor, stream: Rotation | None = None
) -> tuple[Tensor, ...]:
    """Return what the layer with these tensors, whose residual stream is x R, adds to hidden [1, T, E], and the
    tensors that it passes to later layers."""
    module = Layer(layer.plan, layer.index, {}, tensors).module()
    rope = rope_for(layer.config, torch.arange(PROBE_TOKENS, device=hidden.device)[None])
    mask, carried = causal_mask(PROBE_TOKENS), layer.stand_in(PROBE_TOKENS)
    x = hidden if stream is None else stream.right(hidden[0])[None]
    added = module(x, rope, mask, None, carried) - x
    if stream is not None:
        added = stream.right_inverse(added[0])[None]
    return added.float(), *carried.get(layer.index, ())


def attention_readers(layer: Layer) -> list[str]:
    """Return the mixer's weights that multiply its normed input: all except o_proj and inner ones."""
    start = f"{layer.prefix}self_attn."
    others = {f"{start}{name}.weight" for name in ("o_proj", *layer.spec.mixer.inner)}
    return [
        name
        for name in layer.tensors
        if name.startswith(start) and name.endswith("_proj.weight") and name not in others
    ]


def change_rows(layer: Layer, weight: str, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the rows of a weight [N, K] and, as a column [N, 1], to its bias, if any."""
    layer.tensors[weight] = change(layer.tensors[weight])
    bias = f"{weight.removesuffix('.weight')}.bias"
    if bias in layer.tensors:
        layer.tensors[bias] = change(layer.tensors[bias][:, None])[:, 0]


def mlp_readers(layer: Layer) -> list[str]:
    """Return the gated MLP's weights that multiply its normed input."""
    return [f"{layer.prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]


@dataclass(frozen=True, eq=False)
class Group:
    """Weights that read the same channels, and the weight that makes these. Multiplying the columns of the former by a
    scale and dividing the rows of the latter by it changes nothing.

    maker     the name of a norm's weight [C] or a linear layer's [C, ...]: row c and its bias make channel c
    readers   names of weights [N, K]
    channels  int64 [K], the channel that each column of the readers reads (several may read one: grouped queries)
    """

    maker: str
    readers: tuple[str, ...]
    channels: Tensor


def groups(layer: Layer) -> list[Group]:
    """Return the groups of a layer that can be scaled channel by channel without changing its function.

    They are the norms' weights with the layers after them, up_proj with down_proj (act(gate) * up is linear in up; not
    in other MLPs), and v_proj with o_proj if the attention variant lets scales pass and there is no norm between them.
    """
    start, tensors = layer.prefix, layer.tensors
    pairs: list[tuple[str, list[str]]] = []
    if layer.is_layer:
        if layer.spec.norms != "after":
            pairs.append((f"{start}input_layernorm.weight", attention_readers(layer)))
        norm = layer.spec.sub_norms  # before down_proj and o_proj
        if layer.spec.mlp.scalable:
            if layer.spec.norms != "after":
                pairs.append((f"{start}post_attention_layernorm.weight", mlp_readers(layer)))
            maker = "mlp.ffn_sub_norm" if norm else "mlp.up_proj"
            pairs.append((f"{start}{maker}.weight", [f"{start}mlp.down_proj.weight"]))
        if norm:
            pairs.append((f"{start}self_attn.attn_sub_norm.weight", [f"{start}self_attn.o_proj.weight"]))
        elif layer.symmetries.value_scales:
            pairs.append((f"{start}self_attn.v_proj.weight", [f"{start}self_attn.o_proj.weight"]))
    elif layer.index >= 0 and not layer.config.tie_embeddings:
        pairs.append((FINAL_NORM, [HEAD]))
    return [Group(maker, tuple(readers), _channels(layer, maker, tensors[readers[0]])) for maker, readers in pairs]


def _channels(layer: Layer, maker: str, reader: Tensor) -> Tensor:
    """Return the channel of each column: its own, or that of the value head that its head reads."""
    channels, read = len(layer.tensors[maker]), reader.shape[1]
    if channels == read:
        return torch.arange(read)
    width = layer.symmetries.value_width
    head, place = torch.arange(read) // width, torch.arange(read) % width
    return head // (read // channels) * width + place


def scale_groups(layer: Layer, search: Callable[[str, list[Tensor], list[Format], Tensor], Tensor]) -> None:
    """Scale each group with weights to quantize by search(the first's name, weights, formats, channels) -> [C]."""
    with unchanged(layer):
        for group in groups(layer):
            modules = [name.removesuffix(".weight") for name in group.readers]
            modules = [module for module in modules if module in layer.formats]
            weights = [layer.tensors[f"{module}.weight"] for module in modules]
            if weights and all(weight.isfinite().all() for weight in weights):  # else the format raises an error
                formats = [layer.formats[module] for module in modules]
                fold(layer, group, search(modules[0], weights, formats, group.channels))


def per_channel(values: Tensor, channels: Tensor) -> Tensor:
    """Map numbers of columns [K] to numbers of the channels they read [C]: the mean over the columns of a channel."""
    channels = channels.to(values.device)
    empty = values.new_zeros(int(channels.max()) + 1)
    return empty.scatter_reduce(0, channels, values, "mean", include_self=False)


def fold(layer: Layer, group: Group, scale: Tensor) -> None:
    """Multiply the columns of a group's readers by scale [C] of their channels, and divide their maker by it.

    A norm's weight is divided in its own dtype, and the readers are scaled by the resulting quotient, so that nothing
    is lost in fp16, except the rounding of a LayerNorm's bias.
    """
    weight = layer.tensors[group.maker]
    scale = scale.double().to(weight.device)
    if weight.dim() == 1:
        divided = (weight.double() / scale).to(weight.dtype)
        fits = (divided != 0) & divided.isfinite()
        scale = torch.where(fits, weight.double() / divided.double(), 1.0)
        layer.tensors[group.maker] = torch.where(fits, divided, weight)
        bias = f"{group.maker.removesuffix('.weight')}.bias"
        if bias in layer.tensors:
            layer.tensors[bias] = layer.tensors[bias].double() / scale
    else:
        change_rows(layer, group.maker, lambda rows: rows.double() / scale[:, None])
    for name in group.readers:
        layer.tensors[name] = layer.tensors[name].double() * scale[group.channels.to(scale.device)]
