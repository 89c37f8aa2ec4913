"""Checks that the models, tokenizers, windows of text, artifacts and names of a comparison fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib_data import Windows
from ...io import files
from ...io.errors import DiffbitError
from ...io.tokenizer_files import TOKENIZER
from ...models import Checkpoint, ModelConfig
from ...quantize import read_scheme
from ...runtime import Artifact
from .variants import on_a_device


def model_names(checkpoints: Sequence[Checkpoint], names: Sequence[str] | None) -> list[str]:
    """Return one name per model, all different: by default the folders' names, numbered if some are equal."""
    if not checkpoints:
        raise DiffbitError("no model to compare; give one checkpoint folder or more")
    if names is not None and len(names) != len(checkpoints):
        raise DiffbitError(f"{len(names)} names for {len(checkpoints)} models; give one each, or none")
    names = names or [files.folder_name(checkpoint.path) for checkpoint in checkpoints]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    ]


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


def check_tokenizers(checkpoints: Sequence[Checkpoint]) -> None:
    """Check that all have the same vocabulary; skips folders without tokenizer.json."""
    seen: list[tuple[Path, Any]] = []
    for checkpoint in (one for one in checkpoints if TOKENIZER in one.tokenizer_files):
        path = checkpoint.path / TOKENIZER
        tokenizer = files.parse_json(checkpoint.tokenizer_files[TOKENIZER], path)
        seen.append((path, (tokenizer.get("model") or {}).get("vocab")))
    for path, vocabulary in seen[1:]:
        if vocabulary != seen[0][1]:
            raise DiffbitError(
                f"{path}: has another vocabulary than {seen[0][0]}; perplexities per token are comparable only between "
                "models with the same tokenizer: compare them one by one"
            )


def artifacts_of(
    checkpoints: Sequence[Checkpoint], artifacts: Sequence[Artifact], windows: Windows
) -> dict[Path, list[Artifact]]:
    """Return the artifacts of each float checkpoint: those whose model has the same shape."""
    shapes = {c.path: replace(c.config, tie_embeddings=True) for c in checkpoints if read_scheme(c) is None}
    by_path: dict[Path, list[Artifact]] = {}
    for artifact in artifacts:
        artifact.check_output()
        shape = replace(ModelConfig.from_dict(dict(artifact.model)), tie_embeddings=True)
        fitting = [path for path, other in shapes.items() if other == shape]
        if len(fitting) != 1:
            fits = f"fits {' and '.join(map(str, fitting))}" if fitting else "has the shape of none of the float models"
            raise DiffbitError(
                f"{artifact.path}: {fits}; compare it together with the one float checkpoint that it was made from"
            )
        check_windows(artifact.path, artifact.vocab_size, artifact.context_length, windows)
        others, key = by_path.setdefault(fitting[0], []), on_a_device(artifact).key
        if any(on_a_device(other).key == key for other in others):
            raise DiffbitError(
                f"{artifact.path}: another artifact of {fitting[0]} has {', '.join(key[1:])} too; leave one out"
            )
        others.append(artifact)
    return by_path
