"""Recipes: methods in the order they run, joined by + as in "rotate+gptq".

Transforms run first. A recipe has at most one method that rounds; the default is rtn. A method that trains may be
given the number of its steps, as in "learned:50".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from ..errors import DiffbitError
from ..models import ModelConfig
from .methods import find, methods
from .model import Method

ROUNDS = ("quantize", "quantize_layer")
MOST_STEPS = 100_000


@dataclass(frozen=True)
class Recipe:
    """Modules of methods/, in the order they run."""

    name: str  # such as "rotate+gptq"
    transforms: tuple[ModuleType, ...]
    rounding: ModuleType

    @property
    def calibrated(self) -> bool:
        """Whether any of its methods needs calibration tokens."""
        return any(getattr(module, "CALIBRATED", False) for module in (*self.transforms, self.rounding))

    @property
    def exact(self) -> bool:
        """Whether any of its methods needs the float model's hidden states of all calibration tokens."""
        return any(getattr(module, "EXACT", False) for module in (*self.transforms, self.rounding))

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model of `config` after its transforms."""
        for transform in self.transforms:
            if hasattr(transform, "config"):
                config = transform.config(config)
        return config

    def warnings(self, config: ModelConfig) -> list[str | None]:
        """Return its transforms' warnings about such a model."""
        return [transform.warning(config) for transform in self.transforms if hasattr(transform, "warning")]


def table() -> list[dict[str, str]]:
    """Return a row per method: name, when it runs, whether it needs calibration text, its docstring's first line."""
    when = {
        "transform": "before rounding",
        "quantize": "rounds a weight",
        "quantize_layer": "rounds a layer",
    }
    rows = []
    for name in methods():
        module = find(name)
        (kind,) = (words for function, words in when.items() if hasattr(module, function))
        about = (module.__doc__ or "").strip().partition("\n")[0]
        rows.append({"method": name, "what": kind, "text": "yes" if module.CALIBRATED else "no", "about": about})
    return rows


def parse_recipe(text: str | Method | Recipe) -> Recipe:
    """Parse a recipe such as "gptq" or "rotate+gptq", or wrap your own function (weight, format, stats)."""
    if isinstance(text, Recipe):
        return text
    if not isinstance(text, str):
        own: Any = SimpleNamespace(quantize=text)  # has no CALIBRATED: it gets statistics if there are any
        return Recipe(text.__name__, (), own)
    parts = [part.strip() for part in text.split("+")]
    names = [part.partition(":")[0] for part in parts]
    for name in names:
        if name not in methods():
            raise DiffbitError(f"method {name!r} is unknown; wanted one of {', '.join(methods())}, or some joined by +")
        if names.count(name) > 1:
            raise DiffbitError(f"method {text!r} names {name} twice")
    modules = [(part, _with_steps(part)) for part in parts]
    rounding = [(name, module) for name, module in modules if any(hasattr(module, kind) for kind in ROUNDS)]
    if len(rounding) > 1:
        raise DiffbitError(
            f"method {text!r} rounds twice, by {' and by '.join(name for name, _ in rounding)}; leave one of them out"
        )
    transforms = tuple(module for _, module in modules if hasattr(module, "transform"))
    rounds = rounding[0][1] if rounding else find("rtn")
    return Recipe("+".join(parts), transforms, rounds)


def _with_steps(part: str) -> ModuleType:
    """The method of a part of a recipe, such as "learned:50": its module, or one that takes so many steps."""
    name, given, steps = part.partition(":")
    module = find(name)
    if not given:
        return module
    if not hasattr(module, "STEPS"):
        raise DiffbitError(f"method {part!r}: {name} takes no number of steps; write {name}")
    if not steps.isascii() or not steps.isdecimal() or not 1 <= int(steps) <= MOST_STEPS:
        raise DiffbitError(f"method {part!r}: {steps!r} is not a number of steps, 1 to {MOST_STEPS}; write {name}:50")
    chosen: Any = SimpleNamespace(**vars(module))
    chosen.quantize_layer = partial(module.quantize_layer, steps=int(steps))
    return chosen
