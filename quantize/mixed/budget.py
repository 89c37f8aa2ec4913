"""What mixed precision may choose from and how much room there is: bytes of every layer in every candidate format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import DiffbitError
from ...models import ModelConfig
from ..formats import Format, parse_format
from ..report import sizes
from ..scheme import KEPT, Scheme, linear_shapes

CANDIDATES = ("int2_g128", "int2_g64", "int3_g128", "int3_g64", "int4_g128", "int5_g128", "int6_g128", "int8", "none")
FLOAT = "none"  # the name of no format, as in schemes


class Space:
    """sizes: {layer: {candidate: bytes}} of the linear layers that no override fixes; and what all else weighs.

    weights  numbers in the layers that a budget's bits are averaged over: those, and the ones that overrides name
    fixed    bytes of the latter
    rest     bytes of the whole model but for the layers to choose for
    """

    def __init__(self, config: ModelConfig, scheme: Scheme, candidates: Sequence[str], dtype: torch.dtype) -> None:
        names = list(dict.fromkeys(name.strip() for name in candidates))
        self.formats = {name: None if name == FLOAT else parse_format(name) for name in names}
        if not any(self.formats.values()):
            raise DiffbitError(f"the candidates are {', '.join(names) or 'none'}: no format; name two or more")
        self.scheme = scheme
        shapes, given = linear_shapes(config), scheme.formats(config)
        fixed = {module for module in shapes if scheme.overridden(module)}
        self.shapes = {
            module: shape
            for module, shape in shapes.items()
            if module not in fixed and module.rpartition(".")[2] not in KEPT
        }
        if not self.shapes:
            raise DiffbitError("the overrides fix every linear layer; leave some for the budget to choose")

        def nbytes(format: Format | None, module: str) -> int:
            return math.prod(shapes[module]) * dtype.itemsize if format is None else format.nbytes(shapes[module])

        self.sizes = {
            module: {name: nbytes(self.formats[name], module) for name in self._possible(module)}
            for module in self.shapes
        }
        counted = [module for module in fixed if module in given or module.rpartition(".")[2] not in KEPT]
        self.weights = sum(math.prod(shapes[module]) for module in (*self.shapes, *counted))
        self.fixed = sum(nbytes(given.get(module), module) for module in counted)
        self.rest = sizes(config, scheme, dtype).nbytes - sum(nbytes(None, module) for module in self.shapes)

    def _possible(self, module: str) -> list[str]:
        """The candidates that can hold this layer."""
        found, refusal = [], None
        for name, format in self.formats.items():
            try:
                if format is not None:
                    format.check(self.shapes[module])
                found.append(name)
            except DiffbitError as error:
                refusal = error
        if not found:
            raise DiffbitError(f"{module}: none of the candidates can hold it ({refusal}); name another, such as int8")
        return found

    def room(self, bits: float | None, nbytes: int | None) -> int:
        """Bytes for the layers to choose for, of a budget in bits a weight or in bytes of the model; one is None."""
        low, high = (sum(pick(row.values()) for row in self.sizes.values()) for pick in (min, max))
        if bits is not None:
            room = math.floor(bits * self.weights / 8) - self.fixed if math.isfinite(bits) else -1
            wanted = f"{bits:g} bits a weight"
            ends = [f"{self.bits(end):.2f}" for end in (low, high)]
            limits = f"{ends[0]} to {ends[1]} bits a weight"
        else:
            assert nbytes is not None
            room, wanted = nbytes - self.rest, f"{_megabytes(nbytes)} MB"
            limits = f"{_megabytes(self.rest + low)} to {_megabytes(self.rest + high)} MB for the whole model"
        if not low <= room <= high:
            raise DiffbitError(f"{wanted} cannot be had: these candidates and overrides give from {limits}")
        return room

    def bits(self, nbytes: int) -> float:
        """Bits a weight where the layers to choose for take so many bytes."""
        return 8 * (self.fixed + nbytes) / self.weights

    def nbytes(self, choice: Mapping[str, str]) -> int:
        return sum(self.sizes[module][name] for module, name in choice.items())

    def to_scheme(self, choice: Mapping[str, str]) -> Scheme:
        """{layer: candidate} as a scheme: the candidate that most weights have, and an override for each exception."""
        share = {name: 0 for name in self.formats}
        for module, name in choice.items():
            share[name] += math.prod(self.shapes[module])
        most = max(share, key=share.__getitem__)
        exceptions = tuple((module, self.formats[name]) for module, name in choice.items() if name != most)
        return replace(self.scheme, weights=self.formats[most], overrides=(*self.scheme.overrides, *exceptions))


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f}"


def available_memory() -> int | None:
    """Bytes that this process may still take, by Linux' account of the machine and of its control group; else None."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # another system, no limit ("max")
        pass
    return min(found, default=None)
