"""Forecasts of what quantizing and exporting a checkpoint take, from its shapes: memory, disk space and time.

Memory and disk space are the estimates by which commands refuse a run that cannot fit (quantize/forecast.py). Time is
extrapolated from a timed matrix product; other work on the machine makes it longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...export import export_demand
from ...io.resources import resident_memory
from ...models import Checkpoint, num_parameters
from ...quantize import Plan, sizes
from ...quantize.forecast import must_spill, quantize_demand, quantize_seconds
from ...quantize.methods import Recipe
from ...quantize.sizes import TYPICAL_GRAPH, overhead, tokenizer_bytes

CONFIGURATION = 16 << 10  # bytes beside the weights of a checkpoint
WRITTEN = 3e8  # bytes per second
COMPUTED = 4e8  # weights per second, for the golden prompt


@dataclass(frozen=True)
class Forecast:
    """memory: peak bytes of the process; disk: peak bytes of disk space; output: bytes of the output; seconds: on this
    machine without other work on it; hidden_states_on_disk: as --max-memory needs it."""

    memory: int
    disk: int
    output: int
    seconds: float
    hidden_states_on_disk: bool = False


def plan_quantize(
    checkpoint: Checkpoint,
    plan: Plan,
    recipe: Recipe,
    text: tuple[int, int] | None,
    max_memory: int | None,
) -> Forecast:
    """Predict what `quantize_checkpoint` takes. text: windows of calibration text and their length, or None.

    Raises DiffbitError if it takes more than `max_memory` bytes at least.
    """
    spilled = must_spill(checkpoint, plan, recipe, text, max_memory)
    memory, disk = quantize_demand(checkpoint, plan, recipe, text, spilled)
    weights = sizes(plan, stored=getattr(torch, checkpoint.dtype)).checkpoint_bytes
    others = CONFIGURATION + tokenizer_bytes(checkpoint)
    seconds = quantize_seconds(checkpoint.config, recipe, text)
    return Forecast(resident_memory() + memory, disk + others, weights + others, seconds, spilled)


def plan_export(checkpoint: Checkpoint, plan: Plan, dtype: str) -> Forecast:
    """Predict what `export_artifact` takes for a checkpoint that is, or will be, quantized by the plan."""
    memory, weights = export_demand(checkpoint, plan, dtype)
    output = weights + overhead(checkpoint, checkpoint.config, TYPICAL_GRAPH)
    seconds = output / WRITTEN + num_parameters(checkpoint.config) / COMPUTED
    return Forecast(resident_memory() + memory, output, output, seconds)
