"""What a quantization method is. Each file of methods/ makes one, METHOD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..formats import Format, QTensor
from ..io.errors import DiffbitError
from ..models import ModelConfig
from .layer import Layer
from .model import Round

MOST_STEPS = 100_000


@dataclass(frozen=True)
class Method:
    """A method has ONE of transform, round and round_layer.

    about         what it does: the docstring of its file, of which the list of methods shows the first line
    transform     (layer): before rounding, changes layer.tensors but not the model's function
    round         (weight [N, K], format, CalibStats of its input or None) -> QTensor
    round_large   the same, quicker, for a table of more than layerwise.LARGE rows; None: round
    round_layer   (layer) -> {module: QTensor}: rounds the weights of a layer together; with `steps`, also an argument
    calibrated    whether it needs calibration tokens
    reads_stats   whether it is given statistics if there are calibration tokens; None: if it is calibrated
    exact         whether it needs the float model's hidden states of all calibration tokens
    steps         the default number of its training steps; None: it does not train
    config        (config) -> the config of the transformed model; a transform that changes the embedding or the head
                  must untie them there
    warning       (config) -> the layers that a transform leaves unchanged, in a sentence, or None
    """

    name: str
    about: str | None
    transform: Callable[[Layer], None] | None = None
    round: Round | None = None
    round_large: Round | None = None
    round_layer: Callable[..., dict[str, QTensor]] | None = None
    calibrated: bool = False
    reads_stats: bool | None = None
    exact: bool = False
    steps: int | None = None
    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    warning: Callable[[ModelConfig], str | None] = lambda config: None

    def __post_init__(self) -> None:
        kinds = (self.transform, self.round, self.round_layer)
        if sum(kind is not None for kind in kinds) != 1:
            raise DiffbitError(f"method {self.name}: wanted one of transform, round and round_layer")

    @property
    def when(self) -> str:
        """When it runs, for the list of methods."""
        rounds = "rounds a weight" if self.round is not None else "rounds a layer"
        return "before rounding" if self.transform is not None else rounds

    @property
    def stats(self) -> bool:
        """Whether it is given statistics of calibration tokens, if there are any."""
        return self.calibrated if self.reads_stats is None else self.reads_stats

    def with_steps(self, steps: int) -> Method:
        assert self.round_layer is not None and self.steps is not None
        return replace(self, steps=steps, round_layer=partial(self.round_layer, steps=steps))

    def rounds(self, weight: Tensor, format: Format, stats: Any = None, large: bool = False) -> QTensor:
        """Round one weight. large: it is a table with a large vocabulary."""
        assert self.round is not None
        return ((large and self.round_large) or self.round)(weight, format, stats)
