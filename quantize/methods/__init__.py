"""Quantization methods, which turn float weights into low-bit ones. Each is a file, found by listing this folder.

A method's file has ONE of these functions:

    transform(layer) -> None                    before rounding: changes layer.tensors but not the model's function
    quantize(weight, format, stats) -> QTensor  rounds a weight [N, K]; stats: CalibStats of its input, or None
    quantize_layer(layer) -> {module: QTensor}  rounds the weights of a layer together

and CALIBRATED, which says whether it needs calibration tokens. A transform may also have config(config) -> ModelConfig,
which returns the config of the transformed model; a transform that changes the embedding or the head must untie them
there. It may have warning(config) -> str | None, which names the layers that it leaves unchanged. Where quantize_layer
has an argument `steps`, STEPS is its default. layer.py defines layers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


@cache
def methods() -> tuple[str, ...]:
    """Return the names of the methods: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def find(name: str) -> ModuleType:
    """Import the method of this name."""
    return import_module(f".{name}", __name__)
