"""Quantizes a model layer by layer, independent of where it is read from and written to.

`checkpoint.quantize_checkpoint` reads tensors from a folder and writes the layers to another; `apply` works in memory.
Both give bit-identical results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, QTensor
from ..io.errors import DiffbitError
from ..io.processes import Processes
from ..io.progress import Progress
from ..models import Decoder, ModelConfig
from ..models.checkpoint.names import EMBEDDING, HEAD, shapes, stays_float32
from ..models.decoder import check_layer
from .calibration.passes import Passes
from .calibration.rounds import round_all, round_stages
from .calibration.states import ALONE
from .calibration.tokens import LOSS_TOKENS, MEASURED_TOKENS, Tokens
from .deviation import weight_error
from .layer import Layer, Round, assemble
from .methods import Method, Recipe, find, parse_recipe
from .plan import Plan, resolve
from .reorder import Read, reordered
from .report import WeightReport
from .scheme import EMBEDDING_MODULE, HEAD_MODULE, Scheme, weight_shapes
from .sizes import TensorSize

LARGE = 1 << 16  # rows of a table that would take as long as several layers
PLAIN_BITS = 8  # a head of at least as many bits is rounded to nearest


@dataclass(frozen=True)
class Finished:
    """A layer to be stored: float parameters, quantized weights by module, and a report row for each of these."""

    floats: dict[str, Tensor]
    quantized: dict[str, QTensor]
    rows: tuple[WeightReport, ...]


def plan_for(config: ModelConfig, scheme: Scheme, recipe: Recipe) -> Plan:
    """Return the plan to quantize a model: a transform may change its config.

    Raises DiffbitError if the scheme does not fit, or has int4 activations or a format that the method does not
    support.
    """
    if scheme.activations == "int4" and recipe.name != "rtn":
        raise DiffbitError(
            f"method {recipe.name!r} does not support int4 activations, whose Hadamard transform changes the weights; "
            "use method 'rtn', or train with them"
        )
    plan = resolve(recipe.config(config), scheme)
    for module, format in plan.formats.items():
        if format.by_columns and recipe.rounding.alone:
            raise DiffbitError(
                f"{module}: method {recipe.rounding.name!r} rounds each weight on its own, but codes of {format} "
                "depend on each other; use gptq or guided"
            )
    return plan


def quantize_layers(
    config: ModelConfig,
    read: Read,
    plan: Plan,
    recipe: Recipe,
    tokens: Tokens | None = None,
    *,
    skip: int = 0,
    title: str | None = None,
    workers: Processes = ALONE,
) -> Iterator[Finished]:
    """Quantize the float model of `config` whose parameters `read` returns, as `plan_for` says; yield the embedding,
    each layer, then the head.

    Only one layer and the tokens' hidden states are in memory at a time. skip: the number of layers that are already
    done; `tokens` must be past them. title: title of the progress bar, or None for no bar. workers: the processes that
    share the work, the same as those of `tokens`; each yields all layers.
    """
    formats, shapes_of = plan.formats, weight_shapes(config)
    names = [_names(config, index) for index in range(-1, config.num_layers + 1)]
    by_layer = [
        {module: formats[module] for name in layer if (module := name.removesuffix(".weight")) in formats}
        for layer in names
    ]
    counts = [sum(math.prod(shapes_of[module]) for module in layer) for layer in by_layer]
    if tokens is not None and recipe.rounding.token_weights is not None:
        tokens.weights = recipe.rounding.token_weights(config, read, tokens)
    late = _rounds_late(plan.config, by_layer[0], recipe, tokens)
    if late:
        by_layer[-1][HEAD_MODULE] = by_layer[0][EMBEDDING_MODULE]
    before = [sum(counts[:place]) / max(1, sum(counts)) for place in range(len(counts) + 1)]  # shares of all work
    with nullcontext() if title is None else Progress(title, 1.0, before[skip]) as bar:
        for place in range(skip, len(names)):

            def progress(at: str, share: float, begin: float = before[place], end: float = before[place + 1]) -> None:
                if bar is not None:
                    bar.to(begin + share * (end - begin), at.removeprefix("model."))

            chosen = by_layer[place]
            # keep no reference to a layer here, so that only one is in memory at a time
            yield _finish(
                Passes(
                    Layer(plan, place - 1, chosen, _read(config, read, names[place])),
                    tokens,
                    progress,
                    workers,
                ),
                recipe,
                late,
            )
            progress(names[place][-1].removesuffix(".weight"), 1.0)


def _rounds_late(config: ModelConfig, formats: dict[str, Format], recipe: Recipe, tokens: Tokens | None) -> bool:
    """Whether a tied table is rounded last, as the head: an embedding has no inputs to calibrate on."""
    format = formats.get(EMBEDDING_MODULE)
    tied = config.tie_embeddings and format is not None and format.bits < PLAIN_BITS
    return tied and tokens is not None and (recipe.rounding.stats or recipe.rounding.weighs)


def _read(config: ModelConfig, read: Read, names: list[str]) -> dict[str, Tensor]:
    return {name: read(EMBEDDING if name == HEAD and config.tie_embeddings else name) for name in names}


def _finish(passes: Passes, recipe: Recipe, late: bool = False) -> Finished:
    """Quantize a layer and pass its tokens through it.

    late: a tied table is rounded with the last layer; until then the tokens use the table rounded to nearest.
    """
    layer = passes.layer
    if layer.is_layer:
        check_layer(layer.config, layer.index, {layer.local(name): tensor for name, tensor in layer.tensors.items()})
    read = dict(layer.tensors)
    dtypes = {name: tensor.dtype for name, tensor in read.items()}
    tied = {name: layer.tensors[name] for name in (EMBEDDING, HEAD) if name in layer.tensors}
    if passes.tokens is not None:
        passes.expect(passes.batches)  # the final pass of the tokens
    quantized = quantize_one(passes, recipe)
    if layer.config.tie_embeddings and any(layer.tensors[name] is not tensor for name, tensor in tied.items()):
        raise DiffbitError(f"method {recipe.name!r} changes the embedding that the head shares; it must untie them")
    for tensors in (layer.tensors, layer.refitted):  # methods compute in fp32; float parameters keep their stored dtype
        for name, tensor in tensors.items():
            if name.removesuffix(".weight") not in quantized and not stays_float32(name):
                tensors[name] = tensor.to(dtypes[name])
    errors = passes.advance(quantized)
    floats = {
        name: tensor
        for name, tensor in (layer.tensors | layer.refitted).items()
        if name.removesuffix(".weight") not in quantized and name in shapes(layer.config)  # which lacks a tied head
    }
    for name, tensor in floats.items():
        if tensor is not read.get(name) and not tensor.isfinite().all():
            raise DiffbitError(
                f"{name}: method {recipe.name!r} makes it NaN or infinite in {tensor.dtype}, because the weights hold "
                "extreme values; use another method"
            )
    if late and layer.index < 0:
        return Finished({}, {}, ())
    rows = tuple(_row(passes, module, weight, errors.get(module)) for module, weight in quantized.items())
    if late and HEAD_MODULE in quantized:
        quantized = {EMBEDDING_MODULE: quantized[HEAD_MODULE]}
        rows = (replace(rows[0], name=EMBEDDING_MODULE),)
    return Finished(floats, quantized, rows)


def quantize_one(passes: Passes, recipe: Recipe) -> dict[str, QTensor]:
    """Run a recipe's transforms and its rounding on a layer; returns {linear layer: QTensor}.

    Linear layers are rounded stage by stage, each with statistics computed after the earlier ones were rounded (called
    true-sequential in the code of arXiv 2210.17323).
    """
    layer = passes.layer
    rounding = _rounding(layer, recipe)
    if rounding.round_layer is None:
        passes.expect(passes.batches * len(layer.formats))
    for method in recipe.transforms:
        assert method.transform is not None
        method.transform(layer, passes)
    quantized: dict[str, QTensor] = {}
    if rounding.round_layer is not None:
        quantized = rounding.round_layer(layer, passes) if layer.formats else {}
    elif passes.tokens is not None and layer.index >= 0 and rounding.stats:
        quantized = round_stages(layer, passes, lambda name: _round(layer, name, rounding))
    elif passes.tokens is not None and layer.index >= 0 and rounding.weighs:
        importance = passes.importance()
        quantized = round_all(layer, passes, lambda name: _weighed(rounding, importance[name]), layer.formats)
    else:
        quantized = round_all(layer, passes, lambda name: rounding.rounds, layer.formats)
    return {name: quantized[name] for name in layer.formats if name in quantized}  # allocate.py rounds none


def _round(layer: Layer, name: str, rounding: Method) -> Round:
    """Return the function that rounds a weight: of a table with a large vocabulary a quick one, if there is one."""
    return partial(rounding.rounds, large=not layer.is_layer and len(layer.weight(name)) > LARGE)


def _weighed(rounding: Method, importance: Tensor) -> Round:
    """Return the function that rounds a weight whose input channels have this importance."""
    return lambda weight, format, _: rounding.rounds(weight, format, importance)


def _rounding(layer: Layer, recipe: Recipe) -> Method:
    """Return the method that rounds a layer's weights.

    Plain rounding replaces a calibrated method for the embedding, which has no input activations, and for a head of 8
    bits, which gains nothing (research/weights). GPTQ replaces a method that rounds a layer's weights together for a
    tied table.
    """
    plain = layer.index < 0 or (
        not layer.is_layer and all(format.bits >= PLAIN_BITS for format in layer.formats.values())
    )
    if plain and (recipe.rounding.stats or recipe.rounding.weighs):
        return replace(find("rtn"), reads=None)
    tied = not layer.is_layer and layer.config.tie_embeddings
    return find("gptq") if tied and recipe.rounding.round_layer is not None else recipe.rounding


def tokens_for(
    recipe: Recipe,
    config: ModelConfig,
    ids: Any,
    mask: Any,
    device: torch.device | str = "cpu",
    measure: bool = True,
    workers: Processes = ALONE,
) -> Tokens | None:
    """Return calibration tokens for `quantize_layers`; raises DiffbitError if the recipe needs tokens and has none.

    measure: also measure output errors, on MEASURED_TOKENS of them (on all, if a method needs all in the float model;
    on LOSS_TOKENS, if it only weighs channels).
    """
    if ids is not None:
        length = max(1, torch.as_tensor(ids).shape[-1])
        weighs = recipe.rounding.weighs
        windows = max(1, (LOSS_TOKENS if weighs else MEASURED_TOKENS) // length) if measure else 0
        return Tokens(config, ids, mask, device, None if recipe.exact else windows, workers, rounded=not weighs)
    if recipe.calibrated:
        raise DiffbitError(
            f"method {recipe.name!r} needs calibration text: pass --calibrate TEXT, or token ids as `calibration`"
        )
    return None


def _names(config: ModelConfig, index: int) -> list[str]:
    """Return a layer's parameters; the last layer includes the head, tied or not."""
    if index < 0:
        return [EMBEDDING]
    if index < config.num_layers:
        return [name for name in shapes(config) if name.startswith(f"model.layers.{index}.")]
    rest = [name for name in shapes(config) if name != EMBEDDING and not name.startswith("model.layers.")]
    return rest if HEAD in rest else [*rest, HEAD]


def _row(passes: Passes, module: str, weight: QTensor, output_error: float | None) -> WeightReport:
    size = TensorSize(f"{module}.weight", weight.shape, weight.format)
    return WeightReport(
        name=module,
        format=weight.format.name,
        shape=weight.shape,
        weight_error=weight_error(passes.layer.weight(module), weight),
        output_error=output_error,
        proxy_loss=passes.proxy_losses.get(module),
        bits_per_weight=8 * size.device_bytes / size.weights,
        nbytes=size.device_bytes,
    )


def apply(
    decoder: Decoder,
    scheme: Scheme,
    method: str | Round | Recipe = "rtn",
    calibration: Any = None,
    calibration_mask: Any = None,
    *,
    order: int = 0,
) -> Decoder:
    """Return a quantized copy of a float model, bit-identical to what `quantize_checkpoint` and `load` give.

    method, calibration, calibration_mask: as there. order: an order of the model's channels (reorder.py), which gives
    another rounding; 0: the model's own. Tensors that neither the scheme nor the method changes are shared with the
    original.
    """
    source = decoder.state_dict()
    missing = [name for name in shapes(decoder.config) if name not in source]
    if missing:
        raise DiffbitError(f"the model has no float weight {missing[0]}; it is quantized already, pass a float model")
    recipe = parse_recipe(method)
    device = decoder.model.embed_tokens.weight.device
    tokens = tokens_for(recipe, decoder.config, calibration, calibration_mask, device, measure=False)
    read = reordered(decoder.config, source.__getitem__, order)
    weights: dict[str, Tensor | QTensor] = {}
    plan = plan_for(decoder.config, scheme, recipe)
    for layer in quantize_layers(decoder.config, read, plan, recipe, tokens):
        weights |= layer.floats | {f"{module}.weight": weight for module, weight in layer.quantized.items()}
    with torch.device("meta"):
        copy = Decoder(plan.config)
    return assemble(copy, weights, scheme, None).train(decoder.training)
