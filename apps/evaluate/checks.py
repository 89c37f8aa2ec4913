"""Checks that the models, training runs, tokenizers and windows of text of a comparison fit together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...calib_data import Windows
from ...io import files
from ...io.errors import DiffbitError
from ...models import Checkpoint
from ...quantize import read_scheme
from .given import Model, Quantized, tokenizer_of
from .variants import Key


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
                twin = seen[other.sha256()]
                raise DiffbitError(f"{other.path}: has the same weights as {twin}; give runs with different seeds")
            seen[other.sha256()] = other.path
    return groups


def check_windows(path: Path, vocab_size: int, context: int, windows: Windows) -> None:
    """Raise an error if the model at `path` cannot read the text because of its tokens or its length."""
    if (largest := int(windows.ids.max())) >= vocab_size:
        raise DiffbitError(
            f"{path}: the text holds token {largest}, the model has {vocab_size}; use the model's own tokenizer"
        )
    if (length := windows.ids.shape[1]) > context:
        raise DiffbitError(f"{path}: windows of {length} tokens are longer than its context of {context}; shorten them")


def check_tokenizers(models: Sequence[Model]) -> None:
    """Check that all have the same vocabulary; skips folders without tokenizer.json."""
    seen: list[tuple[Path, Any]] = []
    for path, contents in filter(None, map(tokenizer_of, models)):
        tokenizer = files.parse_json(contents, path)
        seen.append((path, (tokenizer.get("model") or {}).get("vocab")))
    for path, vocabulary in seen[1:]:
        if vocabulary != seen[0][1]:
            raise DiffbitError(
                f"{path}: has another vocabulary than {seen[0][0]}; perplexities per token are comparable only between "
                "models with the same tokenizer: compare them one by one"
            )


def check_runs(quantized: Sequence[Quantized]) -> None:
    """Check that no two artifacts of one training run are alike: those of several runs are compared as one."""
    seen: dict[tuple[int, Key], Path] = {}
    for entry in quantized:
        if (twin := seen.setdefault((entry.reference, entry.variant.key), entry.path)) != entry.path:
            raise DiffbitError(
                f"{entry.path}: has {', '.join(entry.variant.key[1:])} as {twin} has; with --runs give one of them"
            )
