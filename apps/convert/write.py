"""Writes a model as another model, layer by layer: with another attention, or with an adapter merged into it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch

from ...io import files
from ...io.errors import DiffbitError
from ...io.progress import track
from ...models import Checkpoint, CheckpointWriter, num_parameters
from ._target import Target, checked
from .differential import ToDifferential
from .mixture import ToMixture

ONE_FILE = 1 << 30  # bytes; a larger model is written one file per layer, so that only one layer is in memory
TARGETS: dict[str, type[ToDifferential] | type[ToMixture]] = {"diff_v2": ToDifferential, "moh": ToMixture}


def convert(
    model: str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    start: str | None = None,
    angle: float | None = None,
    lambda_start: float | None = None,
    heads: float | None = None,
    shared: float | None = None,
    choose: str | None = None,
    calibrate: str | None = None,
    adapter: str | Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the folder `out` with another attention in place of a model's own, or with the model that an adapter is
    merged into, and return it.

    model: a float checkpoint, a folder or a GGUF file; its tokenizer, chat template and generation config come along.
    to: "diff_v2", which makes a plain Transformer differential, or "moh", a mixture of heads, for plain and
    differential models; None: "diff_v2", or with an adapter the model's attention stays as it is. start, angle and
    lambda_start belong to "diff_v2" (ToDifferential), heads, shared, choose and calibrate to "moh" (ToMixture).
    adapter: the folder of a LoRA adapter of this model, in PEFT's layout. dtype: of all weights, float32, bfloat16 or
    float16; None: as they are. One layer, or the embedding, is in memory at a time; the whole model while "moh"
    chooses by importance.

    Raises DiffbitError for a model that is quantized or cannot be converted, for weights that are too large for their
    dtype, and for options that do not go together.
    """
    given = {
        "start": start, "angle": angle, "lambda_start": lambda_start, "heads": heads, "shared": shared,
        "choose": choose, "calibrate": calibrate,
    }  # fmt: skip
    target = _target(to, {name: value for name, value in given.items() if value is not None}, adapter is not None)
    source = Checkpoint(model, adapter)
    files.check_apart(out, source.path, *(() if adapter is None else (adapter,)))
    config = source.config if target is None else target.config(source)
    label = source.dtype if dtype is None else str(dtype).removeprefix("torch.")
    layers = {name: index for index in range(config.num_layers) for name in source.block_names(index)}
    with CheckpointWriter(
        out,
        config,
        dtype=label,
        shard_layers=num_parameters(config) * getattr(torch, label).itemsize > ONE_FILE,
        tokenizer_from=source.tokenizer_files,
        overwrite=overwrite,
    ) as writer:
        parts = [(index, list(names)) for index, names in groupby(source.names, layers.get)]
        for index, names in track(parts, "merging" if target is None else "converting"):
            types = {name: getattr(torch, label) if source.is_adapted(name) else dtype for name in names}
            tensors = {name: checked(source, name, source.read(name), types[name]) for name in names}
            if index is not None and target is not None:
                target.layer(source, config, index, tensors)
            writer.add_layer(tensors)
            del tensors  # before the next ones are read
    return Path(out)


def _target(to: str | None, given: dict[str, object], merges: bool) -> Target | None:
    """Return the target with its options; None: the attention stays as it is."""
    if to is None and merges and given.get("start") is None:
        if given:
            raise DiffbitError(
                f"{', '.join(given)} describe another attention; also say which, with `to`, or give a start, copy or "
                "rotated"
            )
        return None
    to = "diff_v2" if to is None else to
    if to not in TARGETS:
        raise DiffbitError(f"to is {to!r}, wanted one of {', '.join(TARGETS)}")
    for name in given:
        if name not in TARGETS[to].__dataclass_fields__:
            of = next(other for other, target in TARGETS.items() if name in target.__dataclass_fields__)
            raise DiffbitError(f"{name} is an option of {of}, not of {to}; leave it out, or convert to {of}")
    return TARGETS[to](**given)  # type: ignore[arg-type]
