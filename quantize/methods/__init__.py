"""Quantization methods, which turn float weights into low-bit ones, and recipes, which join several.

A method is a file of this folder, or one that a package adds to it (io/plugins.py), and makes METHOD, a `Method`. A
recipe is methods in the order they run, joined by + as in "rotate+gptq": transforms first, then at most one that
rounds, by default rtn. A method that trains may be given the number of its steps, as in "learned:50".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ...formats import Format, QTensor
from ...io import plugins
from ...io.errors import DiffbitError
from ...models import ModelConfig
from ..calibration import Passes, Tokens
from ..layer import FINAL_NORM, Layer, Round, assemble, quantize_weight
from ..reorder import Read

__all__ = [
    "FINAL_NORM", "STEP_TOKENS", "Layer", "Method", "Passes", "Read", "Recipe", "assemble", "find", "methods",
    "parse_recipe", "quantize_weight", "table",
]  # fmt: skip

MOST_STEPS = 100_000
STEP_TOKENS = 256  # per training step; 512 is no better


@dataclass(frozen=True)
class Method:
    """A method has ONE of transform, round and round_layer.

    about         what it does: the docstring of its file, of which the list of methods shows the first line
    transform     (layer, passes): before rounding, changes layer.tensors but not the model's function
    round         (weight [N, K], format, what it `reads` or None) -> QTensor
    round_large   the same, quicker, for a table of more than layerwise.LARGE rows; None: round
    round_layer   (layer, passes) -> {module: QTensor}: rounds the weights of a layer together; with `steps`, also an
                  argument
    calibrated    whether it needs calibration tokens
    reads         what `round` is given if there are calibration tokens: "stats" of its input (CalibStats), the mean
                  "squares" of the float model's input channels, fp32 [K]; None: stats if it is calibrated
    token_weights (config, read, tokens) -> {linear layer: [n, S]}: how much each token weighs in its statistics; called
                  once, before the first layer, with the float model's parameters; layers may share a tensor
    steps         the default number of its training steps, each on STEP_TOKENS tokens, towards the float model's hidden
                  states of all calibration tokens; None: it does not train
    alone         it rounds each weight on its own, so it takes no format `by_columns`
    config        (config) -> the config of the transformed model; a transform that changes the embedding or the head
                  must untie them there
    warning       (config) -> the layers that a transform leaves unchanged, in a sentence, or None
    """

    name: str
    about: str | None
    transform: Callable[[Layer, Passes], None] | None = None
    round: Round | None = None
    round_large: Round | None = None
    round_layer: Callable[..., dict[str, QTensor]] | None = None
    calibrated: bool = False
    reads: Literal["stats", "squares"] | None = None
    token_weights: Callable[[ModelConfig, Read, Tokens], dict[str, Tensor]] | None = None
    steps: int | None = None
    alone: bool = False
    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    warning: Callable[[ModelConfig], str | None] = lambda config: None

    def __post_init__(self) -> None:
        kinds = (self.transform, self.round, self.round_layer)
        if sum(kind is not None for kind in kinds) != 1:
            raise DiffbitError(f"method {self.name}: wanted one of transform, round and round_layer")

    @property
    def when(self) -> str:
        """Return when it runs, for the list of methods."""
        rounds = "rounds a weight" if self.round is not None else "rounds a layer"
        return "before rounding" if self.transform is not None else rounds

    @property
    def stats(self) -> bool:
        """Whether it is given statistics of calibration tokens, if there are any."""
        return self.reads == "stats" or (self.reads is None and self.calibrated)

    @property
    def weighs(self) -> bool:
        """Whether it is given mean squares of the float model's input channels, if there are calibration tokens."""
        return self.reads == "squares"

    def rounds(self, weight: Tensor, format: Format, stats: Any = None, large: bool = False) -> QTensor:
        """Round one weight. large: it is a table with a large vocabulary."""
        assert self.round is not None
        return ((large and self.round_large) or self.round)(weight, format, stats)


@dataclass(frozen=True)
class Recipe:
    """Methods in the order they run."""

    name: str  # such as "rotate+gptq"
    transforms: tuple[Method, ...]
    rounding: Method

    @property
    def calibrated(self) -> bool:
        """Whether any of its methods needs calibration tokens."""
        return any(method.calibrated for method in (*self.transforms, self.rounding))

    @property
    def exact(self) -> bool:
        """Whether it needs the float model's hidden states of all calibration tokens."""
        return any(method.steps is not None for method in (*self.transforms, self.rounding))

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model of `config` after its transforms."""
        for transform in self.transforms:
            config = transform.config(config)
        return config

    def warnings(self, config: ModelConfig) -> list[str | None]:
        """Return its transforms' warnings about such a model."""
        return [transform.warning(config) for transform in self.transforms]


def methods() -> tuple[str, ...]:
    """Return the names of the methods: the names of their files."""
    return tuple(plugins.names(__name__))


def find(name: str) -> Method:
    """Import the method of this name."""
    method: Method = plugins.load(__name__, name).METHOD
    return method


def table() -> list[dict[str, str]]:
    """Return a row per method: name, when it runs, whether it needs calibration text, and what it does."""
    return [
        {
            "method": method.name,
            "what": method.when,
            "text": "yes" if method.calibrated else "no",
            "about": (method.about or "").partition("\n")[0],
        }
        for method in map(find, methods())
    ]


def parse_recipe(text: str | Round | Recipe) -> Recipe:
    """Parse a recipe such as "gptq" or "rotate+gptq", or wrap your own function (weight, format, stats)."""
    if isinstance(text, Recipe):
        return text
    if not isinstance(text, str):
        return Recipe(text.__name__, (), Method(text.__name__, "", round=text, reads="stats"))
    parts = [part.strip() for part in text.split("+")]
    names = [part.partition(":")[0] for part in parts]
    for name in names:
        if name not in methods():
            raise DiffbitError(f"method {name!r} is unknown; wanted one of {', '.join(methods())}, or some joined by +")
        if names.count(name) > 1:
            raise DiffbitError(f"method {text!r} names {name} twice")
    chosen = [(part, _with_steps(part)) for part in parts]
    rounding = [(part, method) for part, method in chosen if method.transform is None]
    if len(rounding) > 1:
        raise DiffbitError(
            f"method {text!r} rounds twice, by {' and by '.join(name for name, _ in rounding)}; leave one of them out"
        )
    transforms = tuple(method for _, method in chosen if method.transform is not None)
    return Recipe("+".join(parts), transforms, rounding[0][1] if rounding else find("rtn"))


def _with_steps(part: str) -> Method:
    """Return the method of a part of a recipe, such as "learned:50"."""
    name, colon, steps = part.partition(":")
    method = find(name)
    if not colon:
        return method
    if method.steps is None or method.round_layer is None:
        raise DiffbitError(f"method {part!r}: {name} takes no number of steps; write {name}")
    if not steps.isascii() or not steps.isdecimal() or not 1 <= int(steps) <= MOST_STEPS:
        raise DiffbitError(f"method {part!r}: {steps!r} is not a number of steps, 1 to {MOST_STEPS}; write {name}:50")
    return replace(method, steps=int(steps), round_layer=partial(method.round_layer, steps=int(steps)))
