"""Writes quantized checkpoints layer by layer from float ones, and reads them as models of QuantLinear layers.

layouts/ defines the tensors on disk, of diffbit's own folders and of others. Their rows have Hugging Face's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files, models
from ..errors import DiffbitError
from ..models import Block, Checkpoint, CheckpointWriter, Decoder, ModelConfig
from ..models.checkpoint.names import shapes, stays_float32
from . import layouts
from .cache import is_low_bit
from .demand import Text, check_fits, in_shards
from .formats import QTensor
from .layerwise import Finished, quantize_layers, stored_config, tokens_for
from .layouts import read_scheme
from .layouts.diffbit import VERSION
from .model import Method, assemble
from .recipe import parse_recipe
from .report import Report, WeightReport, sizes
from .resume import Stored, Unfinished, run
from .scheme import Scheme


def quantize_checkpoint(
    source: str | Path,
    output: str | Path,
    scheme: Scheme,
    *,
    method: str | Method = "rtn",
    calibration: Any = None,
    calibration_mask: Any = None,
    calibration_text: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    max_memory: int | None = None,
) -> Report:
    """Quantize a float checkpoint into a new folder, one layer in memory at a time; return a report of each weight.

    method: names of methods/ joined by +, such as "rotate+gptq", or a function (weight, format, stats) -> QTensor.
    calibration: token ids [n, S] (a tensor or an array) that pass through the model layer by layer (layer.py); methods
    calibrate on them, and each quantized layer's output error is measured on them. calibration_mask: bool [n, S], the
    tokens that count; default all. calibration_text: a description of the text (source, sha256, ...) for config.json
    and the artifact's manifest. resume: continue an interrupted run of this kind (resume.py), if there is one; the
    result is bit-identical. max_memory: most bytes of this process; calibration states move to disk if necessary. A
    run that cannot fit is refused (demand.py).
    """
    checkpoint = _opened(source, output, overwrite)
    config = checkpoint.config
    recipe = parse_recipe(method)
    stored = stored_config(config, scheme, recipe)
    formats = scheme.formats(stored)
    if not formats and not is_low_bit(scheme.attention):
        raise DiffbitError(
            "the scheme quantizes nothing; name a format for the weights, such as --weights int4_g32, or for the KV "
            "cache, such as --kv int4"
        )
    dtype = getattr(torch, checkpoint.dtype)
    tokens = tokens_for(recipe, config, calibration, calibration_mask)
    entry: dict[str, Any] = {"quantizer": "diffbit", "version": VERSION, "scheme": scheme.to_dict()}
    entry["method"] = recipe.name
    if tokens and calibration_text is not None:
        entry["calibration"] = {**calibration_text, "tokens": tokens.count}
    text = None if tokens is None else Text(len(tokens.ids), tokens.ids.shape[1], len(tokens.exact.ids))
    spills = check_fits(checkpoint, scheme, recipe, text, max_memory, output)

    def about() -> dict[str, Any]:
        return run(checkpoint.sha256(), scheme.to_dict(), recipe.name, tokens, entry.get("calibration"))

    rows: list[WeightReport] = []
    unfinished = partial(Unfinished, output, about, tokens, spills=spills, resume=resume, overwrite=overwrite)
    with files.locked(output), unfinished() as done:
        made = quantize_layers(config, checkpoint.read, scheme, recipe, tokens, skip=done.count, title="quantizing")
        layers: Iterator[Stored] = map(_stored, made)  # keeps no reference to a layer
        if recipe.name != "rtn" or tokens:  # plain rounding is too short to be worth resuming
            for layer in layers:
                done.add(layer)
                del layer
            layers = done.layers()
        with CheckpointWriter(
            output,
            stored,
            quantization=entry,
            dtype=checkpoint.dtype,
            shard_layers=in_shards(config, dtype),
            tokenizer_from=checkpoint.path,
            overwrite=overwrite,
        ) as writer:
            for tensors, its_rows in layers:
                writer.add_layer(tensors)
                tensors.clear()  # frees them before the next layer is made
                rows += its_rows
    warnings = [format.warning() for format in formats.values()] + recipe.warnings(config)
    if tokens is not None and recipe.calibrated:
        warnings.append(tokens.unlike())
    return Report(
        scheme=scheme,
        method=recipe.name,
        weights=tuple(rows),
        before=sizes(config, embedding=dtype),
        after=sizes(stored, scheme, embedding=dtype),
        calibration_tokens=tokens.count if tokens else 0,
        warnings=tuple(dict.fromkeys(filter(None, warnings))),
    )


def _opened(source: str | Path, output: str | Path, overwrite: bool) -> Checkpoint:
    """Open the float checkpoint and check that it can be quantized into `output`."""
    checkpoint = Checkpoint(source)
    files.check_apart(output, checkpoint.path)
    files.check_place(output, overwrite=overwrite)
    if checkpoint.quantization is not None:
        raise DiffbitError(f"{checkpoint.path}: is quantized already; start from the float checkpoint it was made from")
    _ = checkpoint.tokenizer_files  # raises an error about a damaged tokenizer now, not at the end
    return checkpoint


def save(
    weights: Mapping[str, Tensor | QTensor],
    path: str | Path,
    config: ModelConfig,
    scheme: Scheme,
    *,
    method: str,
    dtype: torch.dtype = torch.float32,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Write a model whose weights, by name, are already quantized: QTensors as the scheme says, others as `dtype`.

    method: how the weights were rounded, for config.json.
    """
    entry = {"quantizer": "diffbit", "version": VERSION, "scheme": scheme.to_dict(), "method": method}
    label = str(dtype).removeprefix("torch.")
    with CheckpointWriter(path, config, quantization=entry, dtype=label, tokenizer_from=tokenizer_from) as writer:
        for name, weight in weights.items():
            if isinstance(weight, QTensor):
                for part, tensor in weight.parts().items():
                    writer.add(f"{name.removesuffix('.weight')}.{part}", tensor)
            else:
                writer.add(name, weight.to(torch.float32 if stays_float32(name) else dtype))


def load(
    path: str | Path | Checkpoint, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Load the model of a checkpoint: float, or quantized in one of the layouts of layouts/.

    Quantized layers are QuantLinear modules, and the scheme's activations and attention are applied.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    scheme = read_scheme(checkpoint)
    if scheme is None:
        return models.load(checkpoint, dtype=dtype, device=device)
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config)
    weights = {name: layouts.read_weight(checkpoint, name, scheme) for name in shapes(checkpoint.config)}
    return assemble(decoder, weights, scheme, dtype).to(device)


def load_block(checkpoint: Checkpoint, index: int, dtype: torch.dtype = torch.float32) -> Block:
    """Load only decoder layer `index` of a float or quantized checkpoint."""
    with torch.device("meta"):
        block = Block(checkpoint.config, index)
    prefix = f"model.layers.{index}."
    names = [name for name in shapes(checkpoint.config) if name.startswith(prefix)]
    scheme = read_scheme(checkpoint)
    weights = {name.removeprefix(prefix): layouts.read_weight(checkpoint, name, scheme) for name in names}
    return assemble(block, weights, scheme or Scheme(), dtype)


def read_weight(checkpoint: Checkpoint, name: str) -> Tensor | QTensor:
    """Read a parameter by its float name ("model.layers.0.mlp.up_proj.weight"), in canonical row order.

    Returns a Tensor in its stored dtype, or a QTensor if the checkpoint holds it quantized.
    """
    return layouts.read_weight(checkpoint, name, read_scheme(checkpoint))


def _stored(layer: Finished) -> Stored:
    """Return a layer's tensors as a checkpoint stores them."""
    parts = {
        f"{module}.{part}": tensor
        for module, weight in layer.quantized.items()
        for part, tensor in weight.parts().items()
    }
    return layer.floats | parts, layer.rows
