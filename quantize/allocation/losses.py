"""Losses as they are measured: the divergence of two models, and that of a model in which one weight is rounded.

A layer's loss is nearly proportional to its error, (W - Wq)^2 weighted by the mean squared inputs; arXiv 2411.17525
proves it of unweighted errors, and research/LOG.md has the ratios of 35 linear layers. So one format is measured in
each layer, and the other formats' losses are that one times the ratio of their errors. It fails where an error is no
longer small (values at 2 bits), so the format that is measured is the one nearest to the budget.

The hidden states before the current decoder layer are kept, so a loss needs only the layers after it, half of them on
average, and the head: all seven linear layers of L decoder layers cost about 7 L / 2 passes of the sample, and 7 L
passes through the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ...formats import Format, QuantLinear
from ...io.progress import track
from ...models import Decoder
from ..calibration import CalibStats, Passes, Tokens
from ..calibration.gradients import forward
from ..calibration.predictions import divergence, predictions
from ..methods import Layer, Method, find, quantize_weight
from ..plan import Plan

Losses = dict[str, dict[str, float]]  # {linear layer: {candidate: nats per token that the model loses with it}}
Formats = Mapping[str, Mapping[str, Format | None]]  # {linear layer: {candidate: format, None: float}}


@torch.no_grad()
def measure(
    source: Decoder,
    base: Decoder,
    sample: Tokens,
    plan: Plan,
    formats: Formats,
    rounding: Method,
    tokens: Tokens | None,
) -> Losses:
    """Return what each layer loses in its `formats`, measured in the first of them that changes the weight.

    source: the float weights. base: the same model, with the weights that the scheme's overrides fix quantized; losses
    are divergences from it. tokens: calibration tokens for `rounding`, or None.
    """
    exact = list(predictions(base, sample))
    losses: Losses = {}
    weights, layers = source.state_dict(), list(base.model.layers)
    for states in filter(None, (sample, tokens)):
        states.embed(base.embed)
    for index, block in track(enumerate(layers), "measuring losses", total=len(layers)):
        prefix = f"model.layers.{index}."
        tensors = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        fixed = {prefix + n: linear.weight for n, linear in block.named_modules() if isinstance(linear, QuantLinear)}
        rows = {module: row for module, row in formats.items() if module.startswith(prefix)}
        rounded = {module: format for module, row in rows.items() for format in row.values() if format is not None}
        layer = Layer(plan, index, rounded, tensors)
        stats = Passes(layer, tokens).stats(fixed) if tokens is not None and rounded else {}
        for module, row in rows.items():
            weight, inputs = tensors[f"{module}.weight"], stats.get(module)
            errors = {name: rounding_error(weight, format, inputs) for name, format in row.items()}
            loss = 0.0  # per squared error
            for name, format in row.items():
                if format is not None and errors[name]:
                    quantized = quantize_weight(rounding.rounds, f"{module}.weight", weight, format, inputs)
                    blocks = [layer.module(fixed | {module: quantized}), *layers[index + 1 :]]
                    loss = divergence(exact, predictions(base, sample, blocks), sample) / errors[name]
                    break
            losses[module] = {name: loss * error for name, error in errors.items()}
        for states in filter(None, (sample, tokens)):
            states.take_past(index, partial(forward, [block]))
    return losses


def rounding_error(weight: Tensor, format: Format | None, stats: CalibStats | None) -> float:
    """Return the squared error of plain rounding, each input channel weighted by its mean square if `stats` has it."""
    if format is None:
        return 0.0
    lost = (weight.float() - find("rtn").rounds(weight, format).dequantize()).square_().sum(0)
    return float(lost.sum() if stats is None else lost @ stats.gram.diagonal())
