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
from ..quantize import Scheme, read_scheme, read_weight
from ..quantize.demand import in_shards
from ..quantize.layouts import LAYOUTS, WRITTEN


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    layout: str,
    *,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the folder `out` of a quantized checkpoint, a tensor in memory at a time, and return it.

    layout: one of quantize.layouts.WRITTEN. tokenizer: a tokenizer.json, or a folder with one, to use in place of the
    checkpoint's own.
    """
    if layout not in WRITTEN:
        raise DiffbitError(f"layout is {layout!r}, wanted one of {', '.join(WRITTEN)}")
    source = Checkpoint(checkpoint)
    files.check_apart(out, source.path, *([] if tokenizer is None else [tokenizer]))
    try:
        entry = LAYOUTS[layout].settings(source.config, read_scheme(source) or Scheme())
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
            weight = read_weight(source, name)
            if isinstance(weight, Tensor):
                writer.add(name, weight)
                continue
            order = writer.row_order(name)
            for part, tensor in LAYOUTS[layout].parts(weight if order is None else weight.rows(order), entry).items():
                writer.add_raw(f"{name.removesuffix('.weight')}.{part}", tensor)
    return Path(out)
