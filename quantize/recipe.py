"""Recipes: methods in the order they run, joined by + as in "rotate+gptq".

Transforms run first. A recipe has at most one method that rounds; the default is rtn. A method that trains may be
given the number of its steps, as in "learned:50".
"""

from __future__ import annotations

from dataclasses import dataclass

from ..io.errors import DiffbitError
from ..models import ModelConfig
from .method import MOST_STEPS, Method
from .methods import find, methods
from .model import Round


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
        """Whether any of its methods needs the float model's hidden states of all calibration tokens."""
        return any(method.exact for method in (*self.transforms, self.rounding))

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model of `config` after its transforms."""
        for transform in self.transforms:
            config = transform.config(config)
        return config

    def warnings(self, config: ModelConfig) -> list[str | None]:
        """Return its transforms' warnings about such a model."""
        return [transform.warning(config) for transform in self.transforms]


def table() -> list[dict[str, str]]:
    """Return a row per method: name, when it runs, whether it needs calibration text, and what it does."""
    found = map(find, methods())
    return [
        {
            "method": one.name,
            "what": one.when,
            "text": "yes" if one.calibrated else "no",
            "about": (one.about or "").partition("\n")[0],
        }
        for one in found
    ]


def parse_recipe(text: str | Round | Recipe) -> Recipe:
    """Parse a recipe such as "gptq" or "rotate+gptq", or wrap your own function (weight, format, stats)."""
    if isinstance(text, Recipe):
        return text
    if not isinstance(text, str):
        return Recipe(text.__name__, (), Method(text.__name__, "", round=text, reads_stats=True))
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
    name, given, steps = part.partition(":")
    method = find(name)
    if not given:
        return method
    if method.steps is None:
        raise DiffbitError(f"method {part!r}: {name} takes no number of steps; write {name}")
    if not steps.isascii() or not steps.isdecimal() or not 1 <= int(steps) <= MOST_STEPS:
        raise DiffbitError(f"method {part!r}: {steps!r} is not a number of steps, 1 to {MOST_STEPS}; write {name}:50")
    return method.with_steps(int(steps))
