"""Methods: how float weights become low-bit ones. One file each, found by listing this folder.

A method's file has ONE of these functions:

    transform(layer) -> None                    before rounding: changes layer.tensors and not what the model computes
    quantize(weight, format, stats) -> QTensor  rounds a weight [N, K]; stats: CalibStats of its input, or None
    quantize_layer(layer) -> {module: QTensor}  rounds the weights of a layer together

and CALIBRATED, whether it needs calibration tokens. A transform may also have config(config) -> ModelConfig, that of
the model it makes; one that changes the embedding or the head must untie them there. And warning(config) -> str | None,
which names the layers that it leaves as they are. Where quantize_layer has an argument `steps`, STEPS is their default
number. layer.py says what a layer is.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


@cache
def methods() -> tuple[str, ...]:
    """Names of the methods: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def find(name: str) -> ModuleType:
    """The method of this name."""
    return import_module(f".{name}", __name__)
