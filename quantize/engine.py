"""The one engine that takes a float model to low bits, a piece at a time, whatever it is read from and goes to.

`checkpoint.quantize_checkpoint` reads tensors from a folder and writes the pieces to another; `apply` does it all in
memory. Both come out the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import DiffbitError
from ..models import Decoder, ModelConfig
from ..models.layout import EMBEDDING, HEAD, shapes, stays_float32
from ..progress import Progress
from .formats import QTensor
from .methods import Method, Recipe, parse_recipe
from .model import assemble
from .piece import Piece, Tokens, quantize_piece
from .report import WIDTHS, WeightReport, weight_error
from .scheme import HEAD_MODULE, Scheme, linear_shapes

Read = Callable[[str], Tensor]  # a parameter of the float model by its name, in canonical row order


@dataclass(frozen=True)
class Finished:
    """A piece as it is stored: the parameters that stay float, the quantized weights by module, a row for each."""

    floats: dict[str, Tensor]
    quantized: dict[str, QTensor]
    rows: tuple[WeightReport, ...]


def stored_config(config: ModelConfig, scheme: Scheme, recipe: Recipe) -> ModelConfig:
    """That of the quantized model: a transform may change it, and a tied head that is quantized is stored apart.

    A DiffbitError where the scheme's int4 activations are asked of a method that does not know of them.
    """
    if scheme.activations == "int4" and recipe.name != "rtn":
        raise DiffbitError(
            f"method {recipe.name!r} does not know int4 activations, whose Hadamard turns weights too; take method "
            "'rtn', or train with them"
        )
    config = recipe.config(config)
    return replace(config, tie_embeddings=config.tie_embeddings and HEAD_MODULE not in scheme.formats(config))


def quantize_pieces(
    config: ModelConfig,
    read: Read,
    scheme: Scheme,
    recipe: Recipe,
    tokens: Tokens | None = None,
    *,
    skip: int = 0,
    title: str | None = None,
) -> Iterator[Finished]:
    """Quantize the model of `config` whose parameters `read` returns: the embedding, each layer, what follows them.

    Pieces come in that order; only one of them and the tokens' hidden states are in memory at a time. skip: as many are
    there already, and `tokens` are behind them. title: of the progress to show, or None.
    """
    stored, formats, layers = stored_config(config, scheme, recipe), scheme.formats(config), linear_shapes(config)
    names = [_names(config, index) for index in range(-1, config.num_layers + 1)]
    own = [
        {module: formats[module] for name in piece if (module := name.removesuffix(".weight")) in formats}
        for piece in names
    ]
    sizes = [sum(math.prod(layers[module]) for module in piece) for piece in own]
    before = [sum(sizes[:place]) / max(1, sum(sizes)) for place in range(len(sizes) + 1)]  # shares of all the work
    with nullcontext() if title is None else Progress(title, 1.0, before[skip]) as bar:
        for place in range(skip, len(names)):

            def moved(at: str, share: float, begin: float = before[place], end: float = before[place + 1]) -> None:
                if bar is not None:
                    bar.to(begin + share * (end - begin), at.removeprefix("model."))

            # nothing here holds on to a piece: one is in memory at a time
            yield _finish(
                Piece(stored, place - 1, scheme, own[place], _read(config, read, names[place]), tokens, moved), recipe
            )


def _read(config: ModelConfig, read: Read, names: list[str]) -> dict[str, Tensor]:
    return {name: read(EMBEDDING if name == HEAD and config.tie_embeddings else name) for name in names}


def _finish(piece: Piece, recipe: Recipe) -> Finished:
    """Quantize a piece and take its tokens past it."""
    dtypes = {name: tensor.dtype for name, tensor in piece.tensors.items()}
    tied = {name: piece.tensors[name] for name in (EMBEDDING, HEAD) if name in piece.tensors}
    if piece.tokens is not None:
        piece.expect(len(piece.tokens.slices))  # that pass it in the end
    quantized = quantize_piece(piece, recipe)
    if piece.config.tie_embeddings and any(piece.tensors[name] is not tensor for name, tensor in tied.items()):
        raise DiffbitError(f"method {recipe.name!r} changes the embedding that the head shares; it has to untie them")
    for kept in (piece.tensors, piece.refitted):  # methods compute in fp32; what stays float is stored as it came
        for name, tensor in kept.items():
            if name.removesuffix(".weight") not in quantized and not stays_float32(name):
                kept[name] = tensor.to(dtypes[name])
    errors = piece.tokens.advance(piece, quantized) if piece.tokens is not None else {}
    floats = {
        name: tensor
        for name, tensor in (piece.tensors | piece.refitted).items()
        if name.removesuffix(".weight") not in quantized and name in shapes(piece.config)  # no head where it is tied
    }
    rows = tuple(_row(piece, module, weight, errors.get(module)) for module, weight in quantized.items())
    return Finished(floats, quantized, rows)


def tokens_for(
    recipe: Recipe, config: ModelConfig, ids: Any, mask: Any, device: torch.device | str = "cpu"
) -> Tokens | None:
    """Calibration tokens as `quantize_pieces` takes them; a DiffbitError where a recipe needs what is not there."""
    if ids is not None:
        return Tokens(config, ids, mask, device)
    if recipe.calibrated:
        raise DiffbitError(
            f"method {recipe.name!r} needs calibration text: pass --calibrate TEXT, or token ids as `calibration`"
        )
    return None


def _names(config: ModelConfig, index: int) -> list[str]:
    """The parameters of a piece; the head is one of the last piece, tied or not."""
    if index < 0:
        return [EMBEDDING]
    if index < config.num_layers:
        return [name for name in shapes(config) if name.startswith(f"model.layers.{index}.")]
    rest = [name for name in shapes(config) if name != EMBEDDING and not name.startswith("model.layers.")]
    return rest if HEAD in rest else [*rest, HEAD]


def _row(piece: Piece, module: str, weight: QTensor, output_error: float | None) -> WeightReport:
    nbytes = weight.format.device_nbytes(weight.shape, WIDTHS["fp32"])
    return WeightReport(
        name=module,
        format=weight.format.name,
        shape=weight.shape,
        weight_error=weight_error(piece.weight(module), weight),
        output_error=output_error,
        proxy_loss=piece.proxy_losses.get(module),
        bits_per_weight=8 * nbytes / math.prod(weight.shape),
        nbytes=nbytes,
    )


def apply(
    decoder: Decoder,
    scheme: Scheme,
    method: str | Method | Recipe = "rtn",
    calibration: Any = None,
    calibration_mask: Any = None,
) -> Decoder:
    """A quantized copy in memory of a float model, to the bit what `quantize_checkpoint` and `load` would give.

    method, calibration, calibration_mask: as there. What neither the scheme nor the method changes is shared with the
    original: changing one changes both.
    """
    source = decoder.state_dict()
    missing = [name for name in shapes(decoder.config) if name not in source]
    if missing:
        raise DiffbitError(f"the model has no float weight {missing[0]}; it is quantized already")
    recipe = parse_recipe(method)
    device = decoder.model.embed_tokens.weight.device
    tokens = tokens_for(recipe, decoder.config, calibration, calibration_mask, device)
    if tokens is not None:
        tokens.measuring = False  # it costs a third of the time, and nobody reads them here
    weights: dict[str, Tensor | QTensor] = {}
    for piece in quantize_pieces(decoder.config, source.__getitem__, scheme, recipe, tokens):
        weights |= piece.floats | {f"{module}.weight": weight for module, weight in piece.quantized.items()}
    with torch.device("meta"):
        copy = Decoder(stored_config(decoder.config, scheme, recipe))
    return assemble(copy, weights, scheme, None).train(decoder.training)
