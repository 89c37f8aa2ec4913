"""Several training runs of one model, compared as one: another seed gives another model, which may lose more or less.

K runs have the shape of K roundings (metrics.py): sums [K, W], each averaged over its own roundings. So every interval
covers another training run, another rounding, and other text. The k-th runs of two models are paired, such as those
that saw the same batches in the same order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...io.errors import DiffbitError
from ...models import Checkpoint
from ...quantize import read_scheme
from .measure import Measured, Refusal
from .metrics import Scores

Measure = Callable[[Checkpoint, str], tuple[list[Measured], list[Refusal]]]
"""(checkpoint, its label for progress and errors) -> what measure.py returns"""


def in_groups(checkpoints: Sequence[Checkpoint], runs: int) -> list[Sequence[Checkpoint]]:
    """Return one group for each model: every `runs` checkpoints in a row.

    Raises DiffbitError if the number of checkpoints is no multiple, or if those of a group are not runs of one model:
    if their shapes or quantization differ, or two hold the same weights.
    """
    if runs < 1:
        raise DiffbitError(f"runs is {runs}, wanted 1 or more")
    if len(checkpoints) % runs:
        raise DiffbitError(f"{len(checkpoints)} checkpoints are not {runs} training runs of each model; give all runs")
    groups = [checkpoints[start : start + runs] for start in range(0, len(checkpoints), runs)]
    for first, *others in groups:
        seen = {first.sha256(): first.path} if others else {}
        for other in others:
            if other.config != first.config or read_scheme(other) != read_scheme(first):
                raise DiffbitError(
                    f"{other.path}: is no training run of the same model as {first.path}: their config.json differ; "
                    "name all runs of a model one after the other"
                )
            if other.sha256() in seen:
                same = seen[other.sha256()]
                raise DiffbitError(f"{other.path}: has the same weights as {same}; give runs with different seeds")
            seen[other.sha256()] = other.path
    return groups


def measure_runs(name: str, group: Sequence[Checkpoint], measure: Measure) -> tuple[list[Measured], list[Refusal]]:
    """Measure each training run of a model, and combine them; what was refused in several is told once."""
    found: list[list[Measured]] = []
    refused: dict[Refusal, None] = {}
    for run, checkpoint in enumerate(group, 1):
        try:
            one, refusals = measure(checkpoint, name if len(group) == 1 else f"{name}, run {run} of {len(group)}")
        finally:
            gc.collect()  # before the next model is loaded; module hooks are reference cycles
        found.append(one)
        refused |= dict.fromkeys(replace(refusal, model=name) for refusal in refusals)
    return of_runs(found), list(refused)


def of_runs(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Combine the measurements of K runs of a model, each in the same order; leaves out what not all of them have."""
    if len(runs) == 1:
        return list(runs[0])
    by_key = [{one.variant.key if one.variant else None: one for one in run} for run in runs]
    return [_of_runs([run[key] for run in by_key]) for key in by_key[0] if all(key in run for run in by_key)]


def _of_runs(runs: Sequence[Measured]) -> Measured:
    answers = zip(*(one.answers for one in runs), strict=True)
    return replace(
        runs[0],
        scores=Scores.of_repeats([one.scores for one in runs]),
        answers=tuple(np.stack([found.mean(0) for found in sets]) for sets in answers),
    )
