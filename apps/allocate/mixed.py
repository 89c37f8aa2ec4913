"""Mixed precision: chooses a format for each linear layer, so that the model loses least within a budget.

    1. losses    measure what one format costs in each layer: the KL divergence (nats per token) between the model and
                 the model in which only this weight is rounded, by the recipe's own rounding. The other formats' losses
                 are that one times the ratio of their errors
    2. choice    start every layer with its smallest format, then repeatedly take the change of one layer's format
                 that lowers the sum of losses most per byte, until the budget is spent
    3. check     build the chosen model and measure its divergence, because losses need not add up

Bytes are those of the float32 artifact that `diffbit export` makes. A budget in `bits` is the average over the linear
layers that are quantized or could be, scales and zero points included; a budget in `nbytes` is for the whole artifact:
weights, tokenizer, and `overhead` bytes for its graph and configuration. Formats fixed by overrides are not chosen, but
count. A format whose codes a device stores in more bits than they have (int3, int6, ...) is not a candidate: it loses
more in the same bytes.

A layer's loss is nearly proportional to its error, (W - Wq)^2 weighted by the mean squared inputs; arXiv 2411.17525
proves it of unweighted errors, and docs/LOG.md has the ratios of 35 linear layers. It fails where an error is no longer
small (values at 2 bits), so the format that is measured is the one nearest to the budget.

A recipe's transforms (rotate, awq, ...) run once, before 1. For methods that round a layer's weights together, STAND_IN
rounds in 1. The hidden states before the current decoder layer are kept, so a loss needs only the layers after it, half
of them on average, and the head: all seven linear layers of L decoder layers cost about 7 L / 2 passes of the SAMPLE
tokens, and 7 L passes through the head.

Memory: the float model in fp32, twice where the recipe transforms it; hidden states of the calibration tokens; two
models' log-probabilities of the SAMPLE tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...formats import Format, QuantLinear, parse_format
from ...io.errors import DiffbitError
from ...io.progress import track
from ...io.resources import available_memory
from ...models import Checkpoint, Decoder, ModelConfig, load, num_parameters
from ...quantize import Scheme, apply, sizes
from ...quantize.calibration import Batch, CalibStats, Passes, Tokens
from ...quantize.layerwise import stored_config
from ...quantize.methods import Layer, Method, Recipe, find, parse_recipe, quantize_weight
from .plan import overhead

CANDIDATES = ("int2_g128", "int2_g64", "int4_g128", "int4_g32", "int8", "none")
FLOAT = "none"  # means float, as in schemes
SAMPLE = 1024  # calibration tokens on which divergences are measured, approximately
STAND_IN = "gptq"
CHUNK = 1 << 23  # logits computed at a time

N = TypeVar("N", int, float)
Choice = dict[str, str]  # {linear layer: candidate}
Losses = dict[str, dict[str, float]]  # {linear layer: {candidate: nats per token that the model loses with it}}
Bytes = dict[str, dict[str, int]]  # {linear layer: {candidate: bytes}}


@dataclass(frozen=True)
class LayerChoice:
    """A linear layer whose format was chosen.

    losses  {candidate: increase of the model's loss with it in this layer, nats per token}
    sizes   {candidate: bytes}
    """

    name: str
    shape: tuple[int, int]
    format: str
    losses: dict[str, float]
    sizes: dict[str, int]

    @property
    def nbytes(self) -> int:
        return self.sizes[self.format]

    @property
    def loss(self) -> float:
        return self.losses[self.format]

    def next_size(self, larger: bool) -> str | None:
        """Return the candidate with the next larger or smaller size, or None."""
        away = {name: (size - self.nbytes) * (1 if larger else -1) for name, size in self.sizes.items()}
        return min((name for name in away if away[name] > 0), key=away.__getitem__, default=None)


@dataclass(frozen=True)
class Allocation:
    """The result of `allocate`.

    nbytes, bits_per_weight  of the linear layers that a budget in bits averages over
    model_nbytes             upper bound for the whole artifact
    predicted, measured      nats per token: the sum of losses, and the divergence of the chosen model
    curve                    predicted (bits per weight, nats per token) for every budget
    uniform                  {candidate: predicted (bits per weight, nats per token)} with this format in all layers
    tokens                   number of tokens on which divergences were measured
    stand_in                 the method that replaced the recipe's while losses were measured, or None
    """

    scheme: Scheme
    method: str
    layers: tuple[LayerChoice, ...]
    nbytes: int
    bits_per_weight: float
    model_nbytes: int
    predicted: float
    measured: float
    curve: tuple[tuple[float, float], ...]
    uniform: dict[str, tuple[float, float]]
    tokens: int
    stand_in: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(replace(self, scheme=Scheme())) | {"scheme": self.scheme.to_dict()}


def allocate(
    source: str | Path | Checkpoint,
    *,
    bits: float | None = None,
    nbytes: int | None = None,
    scheme: Scheme = Scheme(),  # noqa: B008 (frozen)
    candidates: Sequence[str] = CANDIDATES,
    method: str | Recipe = "rtn",
    calibration: Any,
    calibration_mask: Any = None,
    device: torch.device | str = "cpu",
) -> Allocation:
    """Choose a format for each linear layer of a float checkpoint, within `bits` per weight or `nbytes` of the
    artifact.

    scheme       its overrides, activations and attention are kept; it must not set `weights`
    candidates   names of formats, and "none" for float
    method       the recipe that will round the model with the chosen scheme
    calibration  token ids [n, S], for the method and the divergences; calibration_mask: bool [n, S], tokens that count
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    if checkpoint.quantization is not None:
        raise DiffbitError(f"{checkpoint.path}: is quantized already; start from the float checkpoint it was made from")
    recipe = parse_recipe(method)
    space = _Space(checkpoint, stored_config(checkpoint.config, scheme, recipe), scheme, candidates)
    budget = space.budget(bits, nbytes)
    ranked = space.nearest(budget)
    windows = Tokens(checkpoint.config, calibration, calibration_mask, device)
    _check_memory(checkpoint, windows, copies=2 if recipe.transforms else 1)
    stand_in = STAND_IN if recipe.rounding.round_layer is not None else None
    rounding = find(stand_in) if stand_in else recipe.rounding

    def rounded(decoder: Decoder, scheme: Scheme, recipe: Recipe) -> Decoder:
        read = recipe.calibrated or recipe.rounding.stats
        return apply(decoder, scheme, recipe, *((windows.ids, windows.mask) if read else ()))

    decoder = load(checkpoint, device=device)
    transformed = decoder
    if recipe.transforms:  # they run as if every layer had the candidate nearest to the budget
        no_rounding = Method("nothing", "rounds no weight", round_layer=lambda layer, passes: {})
        transform = Recipe(recipe.name, recipe.transforms, no_rounding)
        nearest = {module: row[0] for module, row in ranked.items()}
        transformed = apply(decoder, space.to_scheme(nearest), transform, windows.ids, windows.mask)
    count = min(len(windows.ids), max(1, SAMPLE // windows.ids.shape[1]))
    rows = torch.arange(count, device=device) * len(windows.ids) // count  # spread evenly
    sample = Tokens(checkpoint.config, windows.ids[rows], windows.mask[rows], device)
    exact = list(predictions(decoder, sample))
    base = rounded(transformed, scheme, Recipe(recipe.name, (), rounding))
    tokens = windows if rounding.stats else None
    start = divergence(exact, predictions(base, sample), sample)
    formats = {module: {name: space.formats[name] for name in row} for module, row in ranked.items()}
    losses = measure(transformed, base, sample, scheme, formats, rounding, tokens)
    choice, _ = choose(space.sizes, losses, budget)
    _, path = choose(space.sizes, losses, math.inf)
    chosen = rounded(decoder, space.to_scheme(choice), recipe)
    taken = _total(space.sizes, choice)
    everywhere = {name: dict.fromkeys(space.sizes, name) for name in space.formats}
    return Allocation(
        scheme=space.to_scheme(choice),
        method=recipe.name,
        layers=tuple(
            LayerChoice(module, space.shapes[module], choice[module], losses[module], row)
            for module, row in space.sizes.items()
        ),
        nbytes=space.fixed + taken,
        bits_per_weight=space.bits(taken),
        model_nbytes=space.rest + taken,
        predicted=start + _total(losses, choice),
        measured=divergence(exact, predictions(chosen, sample), sample),
        curve=tuple((space.bits(size), start + loss) for size, loss in path),
        uniform={
            name: (space.bits(_total(space.sizes, same)), start + _total(losses, same))
            for name, same in everywhere.items()
            if all(name in row for row in space.sizes.values())
        },
        tokens=sample.count,
        stand_in=stand_in,
    )


def choose(sizes: Bytes, losses: Losses, budget: float) -> tuple[Choice, list[tuple[int, float]]]:
    """Choose greedily by marginal loss per byte; return the choice, and (bytes, sum of losses) after each change."""
    choice = {module: min(row, key=lambda name: (row[name], losses[module][name])) for module, row in sizes.items()}
    taken = _total(sizes, choice)
    path = [(taken, _total(losses, choice))]
    while True:
        gains = [
            ((losses[module][choice[module]] - losses[module][name]) / more, module, name, more)
            for module, row in sizes.items()
            for name, size in row.items()
            if 0 < (more := size - row[choice[module]]) <= budget - taken
        ]
        gain, module, name, more = max(gains, default=(0.0, "", "", 0))
        if gain <= 0:
            return choice, path
        path.append((taken + more, path[-1][1] - gain * more))
        choice[module], taken = name, taken + more


def _total(table: Mapping[str, Mapping[str, N]], choice: Choice) -> N:
    """Sum sizes or losses over a choice."""
    return sum(table[module][name] for module, name in choice.items())


class _Space:
    """The layers to choose formats for, and their byte budget.

    sizes    {layer: {candidate: bytes}} of the linear layers that no override fixes
    weights  number of weights that a budget in bits averages over: those layers, and the ones that overrides name
    fixed    bytes of the layers that overrides name
    rest     bytes of the whole artifact without the layers to choose for
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme, candidates: Sequence[str]) -> None:
        names = list(dict.fromkeys(name.strip() for name in candidates))
        self.formats = {name: None if name == FLOAT else parse_format(name) for name in names}
        for format in self.formats.values():
            if format and format.device_bits != format.bits:
                raise DiffbitError(
                    f"candidate {format} is stored in {format.device_bits} bits on a device, and int"
                    f"{format.device_bits} loses less in the same bytes; leave it out"
                )
        if not any(self.formats.values()):
            raise DiffbitError(f"the candidates {', '.join(names) or 'none'} contain no format; name two or more")
        self.scheme = scheme
        whole = sizes(config, scheme, stored=getattr(torch, checkpoint.dtype))
        tensors = {tensor.module: tensor for tensor in whole.tensors}
        fixed = [tensors[module] for module in scheme.overridden(config) if module in tensors]  # not a tied head
        free = [tensors[module] for module in scheme.without_override(config)]
        if not free:
            raise DiffbitError("the overrides fix every linear layer, so there is nothing to choose; remove some")
        self.shapes = {tensor.module: (tensor.shape[0], tensor.shape[1]) for tensor in free}
        self.sizes: Bytes = {}
        for tensor in free:
            row = self.sizes[tensor.module] = {}
            for name, format in self.formats.items():
                with suppress(DiffbitError):  # the format cannot hold this weight
                    if format is not None:
                        format.check(tensor.shape)
                    row[name] = replace(tensor, format=format).device_bytes
            if not row:
                raise DiffbitError(
                    f"{tensor.module}: none of the candidates can hold a weight of shape {tensor.shape}; name another, "
                    "such as int8"
                )
        self.weights = sum(tensor.weights for tensor in (*free, *fixed))
        self.fixed = sum(tensor.device_bytes for tensor in fixed)
        self.rest = whole.nbytes + overhead(checkpoint, config) - sum(tensor.device_bytes for tensor in free)

    def budget(self, bits: float | None, nbytes: int | None) -> int:
        """Return the bytes available to the layers to choose for; one of the two budgets is None."""
        low, high = (sum(pick(row.values()) for row in self.sizes.values()) for pick in (min, max))
        if bits is not None:
            budget = math.floor(bits * self.weights / 8) - self.fixed if math.isfinite(bits) else -1
            asked_for = f"{bits:g} bits per weight"
            limits = f"{self.bits(low):.2f} to {self.bits(high):.2f} bits per weight"
        else:
            assert nbytes is not None
            budget, asked_for = nbytes - self.rest, f"{nbytes / 1e6:,.2f} MB"
            limits = f"{(self.rest + low) / 1e6:,.2f} to {(self.rest + high) / 1e6:,.2f} MB for the whole artifact"
        if not low <= budget <= high:
            raise DiffbitError(f"{asked_for} cannot be reached: these candidates and overrides give {limits}")
        return budget

    def bits(self, nbytes: int) -> float:
        """Return the average bits per weight if the layers to choose for take `nbytes`."""
        return 8 * (self.fixed + nbytes) / self.weights

    def nearest(self, budget: int) -> dict[str, list[str]]:
        """Return each layer's candidates, those nearest to the budget in bytes per weight first; float last."""
        share = budget / sum(math.prod(shape) for shape in self.shapes.values())
        candidates = {}
        for module, row in self.sizes.items():
            target = share * math.prod(self.shapes[module])
            candidates[module] = sorted(row, key=lambda name: (name == FLOAT, abs(row[name] - target)))
        return candidates

    def to_scheme(self, choice: Mapping[str, str]) -> Scheme:
        """Turn {layer: candidate} into a scheme: the format of most weights, and an override for each exception."""
        share = {name: 0 for name in self.formats}
        for module, name in choice.items():
            share[name] += math.prod(self.shapes[module])
        most = max(share, key=share.__getitem__)
        exceptions = tuple((module, self.formats[name]) for module, name in choice.items() if name != most)
        return replace(self.scheme, weights=self.formats[most], overrides=(*self.scheme.overrides, *exceptions))


@torch.no_grad()
def measure(
    source: Decoder,
    base: Decoder,
    sample: Tokens,
    scheme: Scheme,
    formats: Mapping[str, Mapping[str, Format | None]],
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
        layer = Layer(base.config, index, scheme, rounded, tensors)
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
            states.take_past(index, partial(_run, [block]))
    return losses


def rounding_error(weight: Tensor, format: Format | None, stats: CalibStats | None) -> float:
    """Return the squared error of plain rounding, each input channel weighted by its mean square if `stats` has it."""
    if format is None:
        return 0.0
    lost = (weight.float() - find("rtn").rounds(weight, format).dequantize()).square_().sum(0)
    return float(lost.sum() if stats is None else lost @ stats.gram.diagonal())


def divergence(exact: Iterable[Tensor], other: Iterable[Tensor], text: Tokens) -> float:
    """Return KL(exact || other), nats per token, of two models' `predictions` of a text."""
    pairs = zip(exact, other, strict=True)
    return sum((p.exp() * (p - q)).sum(dtype=torch.float64).item() for p, q in pairs) / text.count


@torch.no_grad()
def predictions(decoder: Decoder, text: Tokens, layers: Iterable[nn.Module] | None = None) -> Iterator[Tensor]:
    """Yield log-probabilities fp32 [t, V] of the tokens that count, some tokens at a time.

    layers: run the text's hidden states through these and the head of `decoder`; None: run the whole `decoder`.
    """
    if layers is None:
        text.embed(decoder.embed)
        layers = list(decoder.model.layers)
    for batch in text.batches():
        states = _run(layers, batch)[batch.counted]  # [T, E]
        for rows in states.split(max(1, CHUNK // decoder.config.vocab_size)):
            yield F.log_softmax(decoder.head(rows).float(), dim=-1)


def _run(layers: Iterable[nn.Module], batch: Batch) -> Tensor:
    x = batch.hidden
    for layer in layers:
        x = layer(x, batch.rope, batch.mask, None, batch.carried)
    return x


def _check_memory(checkpoint: Checkpoint, windows: Tokens, copies: int) -> None:
    """Raise an error if the float model does not fit in memory, before the process is killed halfway."""
    config, free = checkpoint.config, available_memory()
    sample = min(SAMPLE, windows.ids.numel())
    numbers = num_parameters(config) * copies + 2 * config.hidden_size * (windows.ids.numel() + sample)
    needed = 4 * (numbers + 2 * sample * config.vocab_size) + num_parameters(config)
    if free is not None and needed > free:
        raise DiffbitError(
            f"{checkpoint.path}: mixed precision needs the float model in memory, about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; choose the formats yourself (--weights, --override), which streams the "
            "model layer by layer, or use a machine with more memory"
        )
