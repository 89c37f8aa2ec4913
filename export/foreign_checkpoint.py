"""A quantized checkpoint in a layout that other programs read: gptq, compressed-tensors, bitsandbytes, bitnet.

Codes, scales and zero points are those of the checkpoint, whatever layout it has itself (quantize/layouts/): a folder
of another layout becomes this one without being quantized again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..io import files
from ..io.errors import DiffbitError
from ..io.progress import track
from ..models import Checkpoint, CheckpointWriter
from ..models.checkpoint.names import shapes
from ..quantize import Scheme
from ..quantize.forecast import in_shards
from ..quantize.layouts import Weights, layouts


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the folder `out` of a quantized checkpoint, a tensor in memory at a time, and return it.

    layout: one that diffbit writes (quantize/layouts/), such as "gptq". tokenizer: a tokenizer.json, or a folder with
    one, to use in place of the checkpoint's own.
    """
    written = {name: known for name, known in layouts().items() if known.settings is not None}
    if layout not in written:
        raise DiffbitError(f"layout is {layout!r}, wanted one of {', '.join(written)}")
    settings, pack = written[layout].settings, written[layout].pack
    assert settings is not None and pack is not None
    source = Checkpoint(checkpoint)
    files.check_apart(out, source.path, *([] if tokenizer is None else [tokenizer]))
    weights = Weights(source)
    try:
        entry = settings(source.config, weights.scheme or Scheme())
    except DiffbitError as error:
        raise error if str(error).startswith(str(source.path)) else DiffbitError(f"{source.path}: {error}") from None
    names = shapes(source.config)
    with CheckpointWriter(
        out,
        source.config,
        quantization=entry,
        dtype=source.dtype,
        shard_layers=in_shards(source.config, getattr(torch, source.dtype)),
        tokenizer_from=source.path if tokenizer is None else tokenizer,
        overwrite=overwrite,
    ) as writer:
        for name in track(names, "exporting", total=len(names)):
            weight = weights.read(name)
            if isinstance(weight, Tensor):
                writer.add(name, weight)
                continue
            order = writer.row_order(name)
            for part, tensor in pack(weight if order is None else weight.rows(order), entry).items():
                writer.add_raw(f"{name.removesuffix('.weight')}.{part}", tensor)
    return Path(out)
