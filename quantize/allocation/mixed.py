"""Mixed precision: chooses a format for each linear layer, so that the model loses least within a budget.

    1. losses    what each format costs in each layer, the KL divergence (nats per token) between the model and the
                 model in which only this weight is rounded: estimated from one forward and one backward pass
                 (sensitivity.py), or measured (losses.py)
    2. choice    start every layer with its smallest format, then repeatedly take the change of one layer's format
                 that lowers the sum of losses most per byte, until the budget is spent
    3. check     build the chosen model and measure its divergence, because losses need not add up. Without measured
                 losses only for a recipe without calibration, which takes seconds

Bytes are those of the float32 artifact that `diffbit export` makes. A budget in `bits` is the average over the weights
that are quantized or could be, scales and zero points included; a budget in `nbytes` is for the whole artifact:
weights, tokenizer, and `overhead` bytes for its graph and configuration. Formats fixed by overrides are not chosen, but
count.

A recipe's transforms (rotate, awq, ...) run once, before 1. For methods that round a layer's weights together, STAND_IN
rounds in 1.

Memory: the float model in fp32, twice where the recipe transforms it; the activations of a window, or hidden states of
the calibration tokens; two models' log-probabilities of the SAMPLE tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...formats import choose_format
from ...io.errors import DiffbitError
from ...io.files import size_text
from ...io.resources import available_memory
from ...models import Checkpoint, Decoder, ModelConfig, load, num_parameters
from ..calibration import Tokens
from ..calibration.predictions import divergence, predictions
from ..layerwise import apply, plan_for
from ..methods import Method, Recipe, find, parse_recipe
from ..plan import Plan, check_float, resolve
from ..scheme import EMBEDDING_MODULE, HEAD_MODULE, Scheme, linear_shapes
from ..sizes import overhead, sizes
from .losses import Losses, measure
from .sensitivity import estimate

# by default: of each width, the format that loses least for its bytes, and what takes its place where it cannot hold a
# weight
CANDIDATES = ("tcq2_g32_s8", "tcq3_g32_s8", "tcq4_g32_s8", "tcq5_g32_s8", "tcq6_g32_s8", "int8_g32", "int8", "none")
INSTEAD = dict(zip(CANDIDATES, ("nl2_g32_s8", "nl3_g32_s8", "nl4_g32_s8", "int5_g32_s8", "int6_g32_s8"), strict=False))
FLOAT = "none"  # means float, as in schemes
SAMPLE = 1024  # calibration tokens on which divergences are measured, approximately
STAND_IN = "gptq"
TABLES = (EMBEDDING_MODULE, HEAD_MODULE)

N = TypeVar("N", int, float)
Choice = dict[str, str]  # {linear layer: candidate}
Bytes = dict[str, dict[str, int]]  # {linear layer: {candidate: bytes}}


@dataclass(frozen=True)
class LayerChoice:
    """A linear layer, an embedding or a head, and the format that was chosen for it.

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

    nbytes, bits_per_weight  of the weights that a budget in bits averages over
    model_nbytes             upper bound for the whole artifact
    predicted, measured      nats per token: the sum of losses, and the divergence of the chosen model (None: not built)
    curve                    predicted (bits per weight, nats per token) for every budget
    uniform                  {candidate: predicted (bits per weight, nats per token)} with this format in all layers,
                             and the smallest one in an embedding or a head that cannot have it
    tokens                   number of tokens on which losses were estimated or measured
    stand_in                 the method that replaced the recipe's while losses were measured, or None
    """

    scheme: Scheme
    layers: tuple[LayerChoice, ...]
    nbytes: int
    bits_per_weight: float
    model_nbytes: int
    predicted: float
    curve: tuple[tuple[float, float], ...]
    uniform: dict[str, tuple[float, float]]
    method: str = "rtn"
    measured: float | None = None
    tokens: int = 0
    stand_in: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the allocation as plain JSON."""
        return asdict(replace(self, scheme=Scheme())) | {"scheme": self.scheme.to_dict()}


def allocate(
    source: str | Path | Checkpoint,
    *,
    bits: float | None = None,
    nbytes: int | None = None,
    scheme: Scheme = Scheme(),  # noqa: B008 (frozen)
    candidates: Sequence[str] | None = None,
    tables: bool = False,
    method: str | Recipe = "rtn",
    calibration: Any,
    calibration_mask: Any = None,
    measuring: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Allocation:
    """Choose a format for each linear layer of a float checkpoint, within `bits` per weight or `nbytes` of the
    artifact.

    scheme       its overrides, activations and attention are kept; it must not set `weights`
    candidates   names of formats, and "none" for float; None: those of CANDIDATES that suit a device
    tables       choose formats for embedding and head, too, in place of the scheme's
    method       the recipe that will round the model with the chosen scheme
    calibration  token ids [n, S], for losses and the method; calibration_mask: bool [n, S], tokens that count
    measuring    measure losses instead of estimating them; not with `tables`
    seed         of the labels that estimates are made from
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    check_float(checkpoint)
    recipe = parse_recipe(method)
    if tables:
        assert not measuring
        scheme = replace(scheme, embedding=None, head=None)
    space = _Space(checkpoint, plan_for(checkpoint.config, scheme, recipe), candidates, tables, recipe.rounding.alone)
    budget = space.budget(bits, nbytes)
    ranked = space.nearest(budget)
    windows = Tokens(checkpoint.config, calibration, calibration_mask, device)
    check_memory(checkpoint, windows, copies=2 if recipe.transforms else 1)
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
    sample = sample_of(windows)
    exact = list(predictions(decoder, sample))
    base = transformed if scheme == Scheme() else rounded(transformed, scheme, Recipe(recipe.name, (), rounding))
    start = 0.0 if base is decoder else divergence(exact, predictions(base, sample), sample)
    formats = {module: {name: space.formats[name] for name in row} for module, row in ranked.items()}
    if measuring:
        plan, read = resolve(base.config, scheme), windows if rounding.stats else None
        losses = measure(transformed, base, sample, plan, formats, rounding, read)
    else:
        losses = estimate(transformed, windows, formats, rounding, seed)
    allocation = space.allocation(losses, budget, start)
    allocation = replace(
        allocation, method=recipe.name, stand_in=stand_in, tokens=sample.count if measuring else windows.count
    )
    if recipe.calibrated and not measuring:
        return allocation
    chosen = rounded(decoder, allocation.scheme, recipe)
    return replace(allocation, measured=divergence(exact, predictions(chosen, sample), sample))


def sample_of(windows: Tokens) -> Tokens:
    """Return about SAMPLE tokens, in windows spread evenly."""
    count = min(len(windows.ids), max(1, SAMPLE // windows.ids.shape[1]))
    rows = torch.arange(count, device=windows.ids.device) * len(windows.ids) // count
    return Tokens(windows.config, windows.ids[rows], windows.mask[rows], windows.ids.device)


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
    """The layers to choose formats for, and the bytes that each candidate takes in them.

    sizes    {layer: {candidate: bytes}} of the linear layers that no override fixes; with `tables`, of the embedding
             and the head, too, where a tied table is the embedding
    weights  number of weights that a budget in bits averages over: those layers, and the ones that overrides name
    fixed    bytes of the layers that overrides name
    rest     bytes of the whole artifact without the layers to choose for
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        candidates: Sequence[str] | None,
        tables: bool,
        alone: bool = False,
    ) -> None:
        chosen_here = candidates is None
        if candidates is None:
            candidates = [INSTEAD.get(name, name) for name in CANDIDATES] if alone else (*CANDIDATES, *INSTEAD.values())
        names = list(dict.fromkeys(name.strip() for name in candidates))
        self.formats = {name: None if name == FLOAT else choose_format(name) for name in names}
        if not any(self.formats.values()):
            raise DiffbitError(f"the candidates {', '.join(names) or 'none'} contain no format; name two or more")
        config, scheme = plan.config, plan.scheme
        self.scheme = scheme
        table = sizes(plan, stored=getattr(torch, checkpoint.dtype))
        tensors = {tensor.module: tensor for tensor in table.tensors}
        fixed = [tensors[module] for module in scheme.overridden(config) if module in tensors]  # not a tied head
        free = [tensors[module] for module in scheme.without_override(config)]
        self.tied = config.tie_embeddings
        if tables:
            free += [tensors[module] for module in scheme.tables_without_override(config) if module in tensors]
        if not free:
            raise DiffbitError("the overrides fix every linear layer, so there is nothing to choose; remove some")
        self.shapes = {tensor.module: (tensor.shape[0], tensor.shape[1]) for tensor in free}
        self.sizes: Bytes = {}
        for tensor in free:
            row = self.sizes[tensor.module] = {}
            for name, format in self.formats.items():
                with suppress(DiffbitError):  # the format cannot hold this weight
                    if format is not None:
                        check = format.check_table if tensor.module == EMBEDDING_MODULE else format.check
                        check(self.shapes[tensor.module])
                    row[name] = replace(tensor, format=format).device_bytes
            for name, other in INSTEAD.items() if chosen_here else ():
                if name in row:
                    row.pop(other, None)
            if not row:
                raise DiffbitError(
                    f"{tensor.module}: none of the candidates can hold a weight of shape {tensor.shape}; name another, "
                    "such as int8"
                )
        self.weights = sum(tensor.weights for tensor in (*free, *fixed))
        self.fixed = sum(tensor.device_bytes for tensor in fixed)
        self.rest = table.nbytes + overhead(checkpoint, config) - sum(tensor.device_bytes for tensor in free)

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
        """Return the candidates of each layer: first the one whose bytes per weight are nearest to the budget, then
        the next nearest, and float last."""
        share = budget / sum(math.prod(shape) for shape in self.shapes.values())
        candidates = {}
        for module, row in self.sizes.items():
            target = share * math.prod(self.shapes[module])
            candidates[module] = sorted(row, key=lambda name: (name == FLOAT, abs(row[name] - target)))
        return candidates

    def allocation(self, losses: Losses, budget: int, start: float) -> Allocation:
        """Return the choice for these losses, which are in addition to `start`; not measured."""
        choice, _ = choose(self.sizes, losses, budget)
        _, path = choose(self.sizes, losses, math.inf)
        taken = _total(self.sizes, choice)
        return Allocation(
            scheme=self.to_scheme(choice),
            layers=tuple(
                LayerChoice(module, self.shapes[module], choice[module], losses[module], row)
                for module, row in self.sizes.items()
            ),
            nbytes=self.fixed + taken,
            bits_per_weight=self.bits(taken),
            model_nbytes=self.rest + taken,
            predicted=start + _total(losses, choice),
            curve=tuple((self.bits(size), start + loss) for size, loss in path),
            uniform={
                name: (self.bits(_total(self.sizes, same)), start + _total(losses, same))
                for name in self.formats
                if (same := self.everywhere(name)) is not None
            },
        )

    def everywhere(self, name: str) -> Choice | None:
        """Return the choice that gives all layers one candidate, or None if a linear layer cannot have it. An embedding
        or a head that cannot have it gets its smallest candidate."""
        choice = {
            module: min(row, key=row.__getitem__) if module in TABLES and name not in row else name
            for module, row in self.sizes.items()
        }
        return choice if all(name in self.sizes[module] for module, name in choice.items()) else None

    def to_scheme(self, choice: Mapping[str, str]) -> Scheme:
        """Turn {layer: candidate} into a scheme: the format of most weights, and an override for each exception."""
        layers = {module: name for module, name in choice.items() if module not in TABLES}
        share = {name: 0 for name in self.formats}
        for module, name in layers.items():
            share[name] += math.prod(self.shapes[module])
        common = max(share, key=share.__getitem__)
        exceptions = tuple((module, self.formats[name]) for module, name in layers.items() if name != common)
        scheme = replace(self.scheme, weights=self.formats[common], overrides=(*self.scheme.overrides, *exceptions))
        if EMBEDDING_MODULE in choice:
            scheme = replace(scheme, embedding=self.formats[choice[EMBEDDING_MODULE]])
        if self.tied and EMBEDDING_MODULE in choice:
            return replace(scheme, head=scheme.embedding)
        return replace(scheme, head=self.formats[choice[HEAD_MODULE]]) if HEAD_MODULE in choice else scheme


def allocation_demand(config: ModelConfig, windows: int, length: int, copies: int = 1) -> int:
    """Return the bytes of memory that `allocate` takes for a text of so many windows; copies: of the float model."""
    sample = min(SAMPLE, windows * length)
    numbers = num_parameters(config) * copies + 2 * config.hidden_size * (windows * length + sample)
    activations = length * (2 * sum(map(sum, linear_shapes(config).values())) + 2 * config.vocab_size)
    return 4 * (numbers + max(activations, 2 * sample * config.vocab_size)) + num_parameters(config)


def check_memory(checkpoint: Checkpoint, windows: Tokens, copies: int) -> None:
    """Raise an error if the float model does not fit in memory, before the process is killed halfway."""
    count, length = windows.ids.shape
    needed, free = allocation_demand(checkpoint.config, count, length, copies), available_memory()
    if free is not None and needed > free:
        raise DiffbitError(
            f"{checkpoint.path}: mixed precision needs the float model in memory, about {size_text(needed)}, and "
            f"{size_text(free)} are free; choose the formats yourself (--weights, --override), which streams the "
            "model layer by layer, or use a machine with more memory"
        )
