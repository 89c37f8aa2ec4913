"""Mixed precision: which format each linear layer gets, so that the model loses least within a budget.

    1. sensitivity   what each format costs in each layer: the KL divergence, nats a token, from the float model of the
                     model in which this one weight is rounded, by the recipe's own rounding (sensitivity.py)
    2. choice        the formats of the least sum of losses within the budget: a knapsack, solved exactly (knapsack.py)
    3. check         losses need not add up, so the model that was chosen is made and its divergence measured. Then 1
                     and 2 again around it, each layer's loss measured in the company of the others' rounding; what
                     measures better is kept

Budgets. `bits`: the average over the linear layers that are quantized or could be, scales and zero points included; a
layer that stays float counts with the bits it is stored in. Where none does, it is compare.py's bits_per_weight.
`nbytes`: all tensors of the model in a file. What overrides fix is not chosen, but counts.

A recipe's transforms (rotate, awq, ...) run once, before 1, as if every layer had the candidate nearest to the budget.
Methods that round a layer's weights together would have to run for each format of each weight: STAND_IN rounds in their
place. Refits take no part in 1 and 2. The check uses the recipe as it is.

Memory: the float model in fp32, twice where the recipe transforms it; a byte a weight for the rounded one; hidden
states of the calibration tokens; the float model's log-probabilities of the SAMPLE tokens, at most 1 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import models
from ...errors import DiffbitError
from ...models import Checkpoint, Decoder, num_parameters
from ...progress import track
from ..engine import apply, stored_config
from ..formats import Format, QTensor
from ..methods import Recipe, parse_recipe
from ..model import quantize_weight
from ..piece import Tokens
from ..scheme import Scheme
from ..stats import CalibStats
from .budget import CANDIDATES, FLOAT, Space, available_memory
from .knapsack import Knapsack
from .sensitivity import CACHE, Reference, sensitivities

SAMPLE = 4096  # calibration tokens, about, on which divergences are measured
ROUNDS = 1  # of measuring again, around the model chosen
STAND_IN = "gptq"

Choice = dict[str, str]  # {linear layer: candidate}
Losses = dict[str, dict[str, float]]  # {linear layer: {candidate: nats a token more than with this layer in float}}


@dataclass(frozen=True)
class LayerPlan:
    """A linear layer whose format was chosen.

    losses  {candidate: nats a token that the model loses by it in this layer}, in the company of the last round
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

    def beside(self, larger: bool) -> str | None:
        """The candidate next in bytes, larger or smaller; None: there is none."""
        away = {name: (size - self.nbytes) * (1 if larger else -1) for name, size in self.sizes.items()}
        return min((name for name in away if away[name] > 0), key=away.__getitem__, default=None)


@dataclass(frozen=True)
class Round:
    """A choice and its divergence, nats a token: what the losses promise, and what the model made of it measures."""

    predicted: float
    measured: float
    formats: Choice


@dataclass(frozen=True)
class Plan:
    """What `plan` returns.

    nbytes, bits_per_weight  of the linear layers that a budget's bits are averaged over
    model_nbytes             of all tensors in a file
    rounds, chosen           the choices that were measured, and which of them it is
    gap                      nats a token that another choice could promise less, at most; 0: it is exact
    curve                    (bits a weight, nats a token) that the first round promises for every budget
    uniform                  {candidate: (bits a weight, nats a token)} that it promises for all layers alike
    tokens                   on which divergences were measured
    stand_in                 what rounded in the place of the recipe's method while losses were measured, or None
    """

    scheme: Scheme
    method: str
    layers: tuple[LayerPlan, ...]
    nbytes: int
    bits_per_weight: float
    model_nbytes: int
    rounds: tuple[Round, ...]
    chosen: int
    gap: float
    curve: tuple[tuple[float, float], ...]
    uniform: dict[str, tuple[float, float]]
    tokens: int
    stand_in: str | None

    @property
    def predicted(self) -> float:
        return self.rounds[self.chosen].predicted

    @property
    def measured(self) -> float:
        return self.rounds[self.chosen].measured

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(replace(self, scheme=Scheme())) | {"scheme": self.scheme.to_dict()}


def plan(
    source: str | Path | Checkpoint,
    *,
    bits: float | None = None,
    nbytes: int | None = None,
    scheme: Scheme = Scheme(),  # noqa: B008 (frozen)
    candidates: Sequence[str] = CANDIDATES,
    method: str | Recipe = "rtn",
    calibration: Any,
    calibration_mask: Any = None,
) -> Plan:
    """Choose a format for each linear layer of a float checkpoint, within `bits` a weight or `nbytes` of the model.

    scheme       its overrides are fixed, its activations and attention logits hold whatever is chosen; no `weights`
    candidates   names of formats, and "none" for float
    method       the recipe that is to round the model by the scheme that comes out
    calibration  token ids [n, S], for the method and for the divergences; calibration_mask: bool [n, S], which count
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    if checkpoint.quantization is not None:
        raise DiffbitError(f"{checkpoint.path}: is quantized already; start from the float checkpoint it was made from")
    recipe = parse_recipe(method)
    config = stored_config(checkpoint.config, scheme, recipe)
    space = Space(config, scheme, candidates, getattr(torch, checkpoint.dtype))
    room = space.room(bits, nbytes)
    windows = Tokens(checkpoint.config, calibration, calibration_mask)
    _check_memory(checkpoint, windows, copies=2 if recipe.transforms else 1)
    return _Search(models.load(checkpoint), space, recipe, windows).run(room)


class _Search:
    """The three steps of the module's docstring, on a model in memory."""

    def __init__(self, decoder: Decoder, space: Space, recipe: Recipe, windows: Tokens) -> None:
        self.decoder, self.space, self.recipe, self.windows = decoder, space, recipe, windows
        self.reference = Reference(decoder, _sample(windows))
        together = hasattr(recipe.rounding, "quantize_layer")
        self.stand_in = STAND_IN if together else None
        self.rounding = parse_recipe(STAND_IN).rounding if together else recipe.rounding
        self.plain = Recipe(recipe.name, (), self.rounding)  # of steps 1 and 2

    def run(self, room: int) -> Plan:
        source = self._transformed(room)
        rounds: list[Round] = []
        starts: list[float] = []
        tables: list[Losses] = []
        knapsacks: list[Knapsack] = []
        around = {module: FLOAT for module in self.space.sizes}
        for index in range(1 + ROUNDS):
            scheme = self.space.scheme if not index else self.space.to_scheme(around)
            base = self._make(source, scheme, self.plain)
            divergence, losses = self._losses(source, base, around, f"measuring sensitivities, round {index + 1}")
            knapsack = Knapsack(
                [list(row.values()) for row in self.space.sizes.values()],
                [[losses[module][name] for name in row] for module, row in self.space.sizes.items()],
            )
            starts.append(divergence)
            tables.append(losses)
            knapsacks.append(knapsack)
            picks = zip(self.space.sizes.items(), knapsack.choose(room), strict=True)
            choice = {module: list(row)[place] for (module, row), place in picks}
            if rounds and choice == around:
                break
            predicted = divergence + sum(losses[m][choice[m]] - losses[m][around[m]] for m in choice)
            made = self._make(self.decoder, self.space.to_scheme(choice), self.recipe)
            rounds.append(Round(predicted, self.reference.divergence(made), choice))
            around = choice
        chosen = min(range(len(rounds)), key=lambda index: rounds[index].measured)
        formats = rounds[chosen].formats
        nbytes = self.space.nbytes(formats)
        return Plan(
            scheme=self.space.to_scheme(formats),
            method=self.recipe.name,
            layers=tuple(
                LayerPlan(
                    name=module,
                    shape=self.space.shapes[module],
                    format=formats[module],
                    losses={name: tables[-1][module][name] for name in row},
                    sizes=dict(row),
                )
                for module, row in self.space.sizes.items()
            ),
            nbytes=self.space.fixed + nbytes,
            bits_per_weight=self.space.bits(nbytes),
            model_nbytes=self.space.rest + nbytes,
            rounds=tuple(rounds),
            chosen=chosen,
            gap=knapsacks[chosen].gap(room),
            curve=tuple((self.space.bits(size), starts[0] + loss) for size, loss in knapsacks[0].curve()),
            uniform=self._uniform(starts[0], tables[0]),
            tokens=self.reference.text.count,
            stand_in=self.stand_in,
        )

    def _uniform(self, start: float, losses: Losses) -> dict[str, tuple[float, float]]:
        found = {}
        for name in self.space.formats:
            if all(name in row for row in self.space.sizes.values()):
                bits = self.space.bits(self.space.nbytes(dict.fromkeys(losses, name)))
                found[name] = (bits, start + sum(row[name] for row in losses.values()))
        return found

    def _make(self, decoder: Decoder, scheme: Scheme, recipe: Recipe) -> Decoder:
        calibrated = getattr(recipe.rounding, "CALIBRATED", True) or recipe.calibrated
        windows = (self.windows.ids, self.windows.mask) if calibrated else ()
        return apply(decoder, scheme, recipe, *windows)

    def _transformed(self, room: int) -> Decoder:
        """The float model after the recipe's transforms, every layer on its way to about the budget's bits a weight."""
        if not self.recipe.transforms:
            return self.decoder
        share = room / sum(math.prod(shape) for shape in self.space.shapes.values())
        nearest = {}
        for module, row in self.space.sizes.items():
            away = {name: abs(row[name] - share * math.prod(self.space.shapes[module])) for name in row}
            nearest[module] = min((name for name in row if name != FLOAT), key=away.__getitem__, default=FLOAT)
        nothing: Any = SimpleNamespace(quantize_layer=lambda piece: {})  # rounds no weight
        recipe = Recipe(self.recipe.name, self.recipe.transforms, nothing)
        return apply(self.decoder, self.space.to_scheme(nearest), recipe, self.windows.ids, self.windows.mask)

    def _losses(self, source: Decoder, base: Decoder, around: Choice, what: str) -> tuple[float, Losses]:
        """The divergence of `base`, made of the choice `around`, and what every candidate would change in it."""
        divergence = self.reference.divergence(base)
        wanted = {
            module: [name for name in dict.fromkeys((FLOAT, *row)) if name != around[module]]
            for module, row in self.space.sizes.items()
        }
        steps = sensitivities(
            self.reference,
            source,
            base,
            self.space.scheme,
            {
                module: [None if name == FLOAT else self.space.formats[name] for name in names]
                for module, names in wanted.items()
            },
            self._round,
            self.windows if getattr(self.rounding, "CALIBRATED", True) else None,
        )
        table = {module: {name: divergence} for module, name in around.items()}
        for module, place, found in track(steps, what, total=sum(map(len, wanted.values()))):
            table[module][wanted[module][place]] = found
        return divergence, {
            module: {name: found - row[FLOAT] for name, found in row.items()} for module, row in table.items()
        }

    def _round(self, module: str, weight: Tensor, format: Format, stats: CalibStats | None) -> QTensor:
        return quantize_weight(self.rounding.quantize, f"{module}.weight", weight, format, stats)


def _sample(windows: Tokens) -> Tokens:
    """Some of the windows, spread evenly over them."""
    count, length = windows.ids.shape
    some = min(count, max(1, SAMPLE // length))
    rows = torch.arange(some) * count // some
    return Tokens(windows.config, windows.ids[rows], windows.mask[rows])


def _check_memory(checkpoint: Checkpoint, windows: Tokens, copies: int) -> None:
    """Refuse a model that this machine cannot hold in float, rather than be killed half way."""
    config, free = checkpoint.config, available_memory()
    sample = min(SAMPLE, windows.ids.numel())
    numbers = num_parameters(config) * copies + 2 * config.hidden_size * (windows.ids.numel() + sample)
    needed = 4 * (numbers + min(sample * config.vocab_size, CACHE)) + num_parameters(config)
    if free is not None and needed > free:
        raise DiffbitError(
            f"{checkpoint.path}: mixed precision compares with the float model in memory, about {needed / 1e9:.1f} GB, "
            f"and {free / 1e9:.1f} GB are free; choose the formats yourself (--weights, --override), which streams the "
            "model layer by layer, or take a machine with more memory"
        )
