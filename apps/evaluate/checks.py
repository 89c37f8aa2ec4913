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
    wanted = list(names) if names is not None else [files.folder_name(checkpoint.path) for checkpoint in checkpoints]
    return [
        name if wanted.count(name) == 1 else f"{name} ({wanted[: index + 1].count(name)})"
        for index, name in enumerate(wanted)
    ]


def check_windows(checkpoint: Checkpoint, windows: Windows) -> None:
    """Raise an error if the model cannot read the text because of its tokens or its length."""
    config, path = checkpoint.config, checkpoint.path
    if (largest := int(windows.ids.max())) >= config.vocab_size:
        raise DiffbitError(
            f"{path}: the text holds token {largest}, the model has {config.vocab_size}; use the model's own tokenizer"
        )
    if (length := windows.ids.shape[1]) > config.max_position:
        raise DiffbitError(
            f"{path}: windows of {length} tokens are longer than its context of {config.max_position}; shorten them"
        )


def check_tokenizers(checkpoints: Sequence[Checkpoint]) -> None:
    """Check that all have the same vocabulary; skips folders without tokenizer.json."""
    seen: list[tuple[Path, Any]] = []
    for checkpoint in checkpoints:
        if TOKENIZER in checkpoint.tokenizer_files:
            file = checkpoint.path / TOKENIZER
            model = files.parse_json(checkpoint.tokenizer_files[TOKENIZER], file).get("model") or {}
            seen.append((file, model.get("vocab")))
    for path, vocabulary in seen[1:]:
        if vocabulary != seen[0][1]:
            raise DiffbitError(
                f"{path}: has another vocabulary than {seen[0][0]}; perplexities per token are comparable only between "
                "models with the same tokenizer: compare them one by one"
            )


def owned_artifacts(
    checkpoints: Sequence[Checkpoint], artifacts: Sequence[Artifact], windows: Windows
) -> dict[Path, list[Artifact]]:
    """Return the artifacts of each float checkpoint: those whose model has the same shape."""
    shapes = {c.path: replace(c.config, tie_embeddings=True) for c in checkpoints if read_scheme(c) is None}
    owned: dict[Path, list[Artifact]] = {}
    for artifact in artifacts:
        shape = replace(ModelConfig.from_dict(dict(artifact.model)), tie_embeddings=True)
        found = [path for path, one in shapes.items() if one == shape]
        if len(found) != 1:
            fits = "fits " + " and ".join(map(str, found)) if found else "is of none of the float models by its shape"
            raise DiffbitError(
                f"{artifact.path}: {fits}; compare it beside the one float checkpoint that it was made from"
            )
        length = windows.ids.shape[1]
        if length > artifact.context_length:
            raise DiffbitError(
                f"{artifact.path}: windows of {length} tokens are longer than its context of "
                f"{artifact.context_length}; shorten them"
            )
        others, key = owned.setdefault(found[0], []), on_a_device(artifact).key
        if any(on_a_device(one).key == key for one in others):
            raise DiffbitError(
                f"{artifact.path}: another artifact of {found[0]} has {', '.join(key[1:])} too; leave one out"
            )
        others.append(artifact)
    return owned
