"""Writes quantized checkpoints layer by layer from float ones, and loads them as models with QuantLinear layers.

layouts/ defines the tensors on disk, for diffbit's own format and others. Their rows are in Hugging Face's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..formats import QTensor
from ..io import files
from ..io.errors import DiffbitError
from ..io.processes import Processes
from ..io.resources import require
from ..models import Block, Checkpoint, CheckpointWriter, Decoder, ModelConfig
from ..models.checkpoint.names import shapes, stays_float32
from .calibration.states import ALONE
from .forecast import in_shards, must_spill, quantize_demand
from .layer import Round, assemble
from .layerwise import Finished, plan_for, quantize_layers, tokens_for
from .layouts import Weights
from .methods import parse_recipe
from .on_grid import ROUNDING
from .plan import Plan, check_float, resolve
from .report import REPORT_FILE, Report, WeightReport
from .resume import StoredLayer, Unfinished, run
from .scheme import KV, Scheme
from .sizes import sizes

LARGE_BIAS = 20.0  # of a key's channel, whose own numbers are a few units wide


def quantize_checkpoint(
    source: str | Path | Checkpoint,
    output: str | Path,
    scheme: Scheme,
    *,
    method: str | Round = "rtn",
    calibration: Any = None,
    calibration_mask: Any = None,
    calibration_text: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    max_memory: int | None = None,
    workers: Processes = ALONE,
) -> Report:
    """Quantize a float checkpoint into a new folder, one layer in memory at a time. Returns a report of each weight,
    which the folder holds, too.

    source: a folder, a GGUF file, or a checkpoint with an adapter to merge.
    method: names from methods/ joined by +, such as "rotate+gptq", or a function (weight, format, stats) -> QTensor.
    calibration: token ids [n, S] (a tensor or an array) that pass through the model layer by layer; methods
    calibrate on them, and each quantized layer's output error is measured on them. calibration_mask: bool [n, S], the
    tokens that count; default all. calibration_text: a description of the text (source, sha256, ...) for config.json
    and the artifact's manifest, which also have the float checkpoint's name and hash. resume: continue an interrupted
    run (resume.py), if there is one. max_memory: the most bytes that this process may use; calibration states move to
    disk if necessary. workers: the processes that share the work, and this one's device; each calls this, and the first
    writes. Neither resume nor the number of processes changes a bit of the result; a GPU sums in another order than a
    CPU. Raises DiffbitError for a checkpoint or scheme that does not fit, and if memory or disk do not suffice.
    """
    checkpoint = open_float(source, output if workers.first else None, overwrite)
    config = checkpoint.config
    recipe = parse_recipe(method)
    plan = plan_for(config, scheme, recipe)
    _check_quantizes(plan)
    dtype = getattr(torch, checkpoint.dtype)
    tokens = tokens_for(recipe, config, calibration, calibration_mask, workers.device, workers=workers)
    entry = scheme.to_entry() | {"method": recipe.name}
    if tokens and calibration_text is not None:
        entry["calibration"] = {**calibration_text, "tokens": tokens.count}
    if workers.first:  # `diffbit compare` finds the float model by it
        entry["source"] = {"name": files.folder_name(checkpoint.path), "sha256": checkpoint.sha256()}
    text = None if tokens is None else (tokens.ids.shape[0], tokens.ids.shape[1])
    spilled = must_spill(checkpoint, plan, recipe, text, max_memory)
    what = f"quantizing {checkpoint.path} with method {recipe.name!r}"
    memory, disk = quantize_demand(checkpoint, plan, recipe, text, spilled)
    advice = ", or a method that needs less (--method rtn; see `diffbit plan`)"
    require(what, memory, disk, output, processes=workers.local, advice=advice)
    if spilled and tokens is not None:
        files.make_folder(files.resolved(output).parent)
        tokens.spill(files.resolved(output).parent)

    def about() -> dict[str, Any]:
        return run(checkpoint.sha256(), scheme.to_dict(), recipe.name, tokens, entry.get("calibration"))

    def read(name: str) -> Tensor:
        return checkpoint.read(name).to(workers.device)

    def layers_after(count: int | None) -> Iterator[Finished]:
        """Quantize the layers after the first `count`, which an earlier run finished; only the first process knows
        the count."""
        skip = workers.broadcast(0, count)
        for states in (tokens.exact, tokens) if tokens is not None and skip and workers.count > 1 else ():
            states.from_first()
        return quantize_layers(config, read, plan, recipe, tokens, skip=skip, title="quantizing", workers=workers)

    writer = partial(
        CheckpointWriter, output, plan.config, quantization=entry, dtype=checkpoint.dtype,
        shard_layers=in_shards(config, dtype), tokenizer_from=checkpoint.tokenizer_files, overwrite=overwrite,
    )  # fmt: skip
    unfinished = partial(Unfinished, output, about, tokens, resume=resume, overwrite=overwrite)
    keeps = recipe.name != "rtn" or tokens is not None  # plain rounding is too fast to be worth resuming
    if not workers.first:
        deque(layers_after(None), maxlen=0)

    def report(rows: list[WeightReport]) -> Report:
        changed = {row.format for row in rows if row.weight_error > ROUNDING}
        warned = [format for format in plan.formats.values() if not format.trained or format.name in changed]
        warnings = [format.warning() for format in warned] + recipe.warnings(config)
        warnings += [_biased_keys(checkpoint, scheme)]
        if tokens is not None and recipe.calibrated:
            warnings.append(tokens.unlike())
        return Report(
            scheme, recipe.name, tuple(rows), sizes(resolve(config), stored=dtype), sizes(plan, stored=dtype),
            tokens.count if tokens else 0, tuple(dict.fromkeys(filter(None, warnings))),
        )  # fmt: skip

    return report(workers.on_first(lambda: _written(output, unfinished, keeps, layers_after, writer, report)))


def _biased_keys(checkpoint: Checkpoint, scheme: Scheme) -> str | None:
    """Return a warning about keys whose biases make a low-bit cache coarse: one scale serves a token's whole key, and a
    few channels with a large bias, as Qwen2.5's, leave few levels for the others."""
    formats = {
        f"model.layers.{index}.self_attn.k_proj.bias": own.key_format
        for index, own in enumerate(scheme.attention.of_model(checkpoint.config))
        if own.key_format in KV
    }
    largest = {name: float(checkpoint.read(name).abs().max()) for name in formats if name in checkpoint.names}
    if not largest:
        return None
    name, size = max(largest.items(), key=lambda item: item[1])
    if size <= LARGE_BIAS:
        return None
    return (
        f"{name} has entries of up to {size:.3g}, which leave few of the levels of {formats[name]} keys for other "
        "channels: measure the model, or keep its keys in float16 (--kv fp16,int8)"
    )


def _check_quantizes(plan: Plan) -> None:
    """Refuse a plan that quantizes nothing."""
    attention = plan.scheme.attention
    if not plan.formats and not attention.is_low_bit and attention.states is None:
        raise DiffbitError(
            "the scheme quantizes nothing; name a format for the weights, such as --weights int4_g32, or for the KV "
            "cache, such as --kv int4"
        )


def _written(
    output: str | Path,
    unfinished: Callable[[], Unfinished],
    keeps: bool,
    layers_after: Callable[[int], Iterator[Finished]],
    writer: Callable[[], CheckpointWriter],
    report: Callable[[list[WeightReport]], Report],
) -> list[WeightReport]:
    """Write the finished layers of an earlier run, then `layers_after` them, and the report of these weights. keeps:
    save each layer for --resume."""
    rows: list[WeightReport] = []
    with files.locked(output), unfinished() as done:
        layers: Iterator[StoredLayer] = map(_stored, layers_after(done.count))  # keeps no reference to a layer
        if keeps:
            for layer in layers:
                done.add(layer)
                del layer
            layers = done.layers()
        with writer() as checkpoint:
            for tensors, its_rows in layers:
                checkpoint.add_layer(tensors)
                tensors.clear()  # frees them before the next layer is made
                rows += its_rows
            files.write_json(checkpoint.folder / REPORT_FILE, report(rows).to_dict())
    return rows


def open_float(source: str | Path | Checkpoint, output: str | Path | None, overwrite: bool) -> Checkpoint:
    """Open the float checkpoint; check that it can be quantized into `output` (None: another process writes)."""
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    if output is not None:
        files.check_apart(output, checkpoint.path, *(() if checkpoint.adapter is None else (checkpoint.adapter.path,)))
        files.check_place(output, overwrite=overwrite)
    check_float(checkpoint)
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
    tokenizer_from: str | Path | Mapping[str, bytes] | None = None,
) -> None:
    """Write a model with weights that are already quantized, by name: QTensors as they are, Tensors in `dtype`.

    method: how the weights were rounded, for config.json.
    """
    entry = scheme.to_entry() | {"method": method}
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

    Quantized layers are QuantLinear modules; the scheme's formats of activations and attention are applied.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    weights = Weights(checkpoint)
    if weights.scheme is None:
        return models.load(checkpoint, dtype=dtype, device=device)
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config)
    tensors = {name: weights.read(name) for name in shapes(checkpoint.config)}
    return assemble(decoder, tensors, weights.scheme, dtype).to(device)


def load_block(source: Checkpoint | Weights, index: int, dtype: torch.dtype = torch.float32) -> Block:
    """Load only decoder layer `index` of a float or quantized checkpoint. For several layers, pass one `Weights`."""
    weights = source if isinstance(source, Weights) else Weights(source)
    config, prefix = weights.checkpoint.config, f"model.layers.{index}."
    with torch.device("meta"):
        block = Block(config, index)
    names = [name for name in shapes(config) if name.startswith(prefix)]
    tensors = {name.removeprefix(prefix): weights.read(name) for name in names}
    return assemble(block, tensors, weights.scheme or Scheme(), dtype)


def _stored(layer: Finished) -> StoredLayer:
    """Return a layer's tensors as a checkpoint stores them, on the CPU."""
    parts = {
        f"{module}.{part}": tensor
        for module, weight in layer.quantized.items()
        for part, tensor in weight.parts().items()
    }
    return {name: tensor.cpu() for name, tensor in (layer.floats | parts).items()}, layer.rows
