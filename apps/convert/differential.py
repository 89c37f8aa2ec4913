"""A pretrained plain Transformer as a differential one, version 2 (models/attention/diff_v2.py):

    o_h = a_2h - sigmoid(w_h x + b_h) a_2h+1,    a_j = softmax(q_j k^T / sqrt d) v

start "copy" computes the same function. Both queries of a pair are those of the plain head, so a_2h = a_2h+1 = a. w and
b are 0, so sigmoid is 1/2 and o_h = a - a/2 = a/2; o_proj is doubled. Every factor is a power of two, so no float is
rounded, whatever its format. The KV cache stays as large; q_proj doubles, and w adds one row per head.

start "rotated": the noise query is the signal query, turned by an angle in each plane (j, j + d/2) that RoPE turns.
Turns of a plane commute, so this one goes into the rows of q_proj. b is -6: lambda begins at sigmoid(-6) = 0.0025, and
training opens it. At 90 degrees the two queries are orthogonal. So starts CoDA (Constrained Orthogonal Differential
Attention, A. Maio 2026, PyPI coda-gqa-l), where the angle stays a parameter and a norm follows the heads. A norm of
queries (Qwen 3) stands between q_proj and RoPE and has one weight per channel for both queries, so the turn passes
through it only if the two channels of each plane have equal weights, or if it is by 180 degrees.

Where a norm follows the heads (BitNet's sub-norms), o_proj comes too late: the norm's epsilon has seen a/2. Such a
model has v_proj doubled instead.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ...io import files
from ...io.errors import DiffbitError
from ...io.progress import track
from ...models import Checkpoint, CheckpointWriter, ModelConfig, attention_options, num_parameters

STARTS = ("copy", "rotated")
LAMBDA_BIAS = -6.0  # of a rotated start
ONE_FILE = 1 << 30  # bytes; a larger model is written one file per layer, so that only one layer is in memory


def convert(
    model: str | Path,
    out: str | Path,
    *,
    start: str = "copy",
    angle: float = 90.0,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the folder `out` with the differential version of a plain Transformer, and return it.

    model: a float checkpoint, a folder or a GGUF file; its tokenizer, chat template and generation config come along.
    start: "copy" or "rotated" (above). angle: of a rotated start, in degrees. dtype: of all weights, float32, bfloat16
    or float16; None: as they are. One layer, or the embedding, is in memory at a time.

    Raises DiffbitError for a model that is quantized, differential already, or has layers other than attention; for
    weights that are too large for their dtype; and for an angle that a norm of queries does not allow.
    """
    if start not in STARTS:
        raise DiffbitError(f"start is {start!r}, wanted one of {', '.join(STARTS)}")
    if not math.isfinite(angle):
        raise DiffbitError(f"angle is {angle}, wanted a number of degrees")
    source = Checkpoint(model)
    files.check_apart(out, source.path)
    config = _differential(source, lambda_bias=start == "rotated")
    label = source.dtype if dtype is None else str(dtype).removeprefix("torch.")
    layers = {name: index for index in range(config.num_layers) for name in source.block_names(index)}
    with CheckpointWriter(
        out,
        config,
        dtype=label,
        shard_layers=num_parameters(config) * getattr(torch, label).itemsize > ONE_FILE,
        tokenizer_from=source.path,
        overwrite=overwrite,
    ) as writer:
        parts = [(index, list(names)) for index, names in groupby(source.names, layers.get)]
        for index, names in track(parts, "converting"):
            tensors = {name: _cast(source, name, source.read(name), dtype) for name in names}
            if index is not None:
                _convert_layer(source, config, index, tensors, None if start == "copy" else angle)
            writer.add_layer(tensors)
            del tensors  # before the next ones are read
    return Path(out)


def _differential(source: Checkpoint, lambda_bias: bool) -> ModelConfig:
    """Return the differential model's config; raises DiffbitError for a model that cannot be converted."""
    if source.quantization is not None:
        raise DiffbitError(f"{source.path}: is quantized; convert the float model, then quantize the result")
    layers = []
    for index, layer in enumerate(source.config.layers):
        if (name := layer.mixer.name) != "softmax":
            kind = f"differential already ({name})" if layer.mixer.softmaxes else f"{name}, which is no attention"
            raise DiffbitError(
                f"{source.path}: layer {index} is {kind}; wanted a plain Transformer, whose layers all have softmax "
                "attention"
            )
        if getattr(layer.mixer, "qk_norm_whole", False):
            raise DiffbitError(
                f"{source.path}: layer {index} has a norm of all queries of a token together, whose sum over twice as "
                "many queries rounds otherwise; a model with such norms is not converted"
            )
        mixer = attention_options("diff_v2")(**asdict(layer.mixer) | {"lambda_bias": lambda_bias})
        layers.append(replace(layer, mixer=mixer))
    return replace(source.config, layers=tuple(layers))


def _convert_layer(
    source: Checkpoint, config: ModelConfig, index: int, tensors: dict[str, Tensor], angle: float | None
) -> None:
    """Change a plain layer's tensors to those of the differential one, in place. angle: None for a copy."""
    attention = f"model.layers.{index}.self_attn."
    pairs = config.layers[index].mixer.softmaxes // 2
    query = tensors[f"{attention}q_proj.weight"]
    tensors[f"{attention}lambda_proj.weight"] = query.new_zeros(pairs, config.hidden_size)
    doubled = ["o_proj.weight"]
    if any(layer.sub_norms for layer in config.layers):
        doubled = ["v_proj.weight", "v_proj.bias"]
    if angle is not None:
        _check_angle(source, tensors.get(f"{attention}q_norm.weight"), index, angle)
        tensors[f"{attention}lambda_proj.bias"] = query.new_full((pairs,), LAMBDA_BIAS)
        doubled = []
    for name in (f"{attention}q_proj.weight", f"{attention}q_proj.bias"):
        if name in tensors:
            heads = tensors[name].unflatten(0, (pairs, -1))  # [H, d, E], or [H, d]
            noise = heads if angle is None else _turned(heads, angle)
            tensors[name] = torch.stack((heads, noise), 1).flatten(0, 2)  # [2 H d, E], the queries of a pair adjacent
    for name in doubled:
        if (name := attention + name) in tensors:
            tensors[name] = _cast(source, name, 2 * tensors[name], None)


def _turned(heads: Tensor, angle: float) -> Tensor:
    """Turn heads [H, d, ...] by `angle` degrees in each plane (j, j + d/2)."""
    low, high = heads.double().chunk(2, 1)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return torch.cat((cos * low - sin * high, sin * low + cos * high), 1).to(heads.dtype)


def _check_angle(source: Checkpoint, norm: Tensor | None, index: int, angle: float) -> None:
    """Raise DiffbitError unless turning by `angle` commutes with the norm's weight [d]."""
    if norm is None or angle % 180 == 0:
        return
    low, high = norm.chunk(2)
    if not torch.equal(low, high):
        raise DiffbitError(
            f"{source.path}: the norm of queries in layer {index} has different weights for the two channels of a "
            f"plane, so a turn by {angle:g} degrees does not pass through it; use --angle 180 or --start copy"
        )


def _cast(source: Checkpoint, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor as `dtype` (None: as it is); raises DiffbitError if that makes a number infinite."""
    converted = tensor if dtype is None else tensor.to(dtype)
    low, high = torch.aminmax(converted)
    if torch.isinf(low) or torch.isinf(high):
        label = str(converted.dtype).removeprefix("torch.")
        raise DiffbitError(
            f"{source.path}: tensor {name} has numbers beyond {torch.finfo(converted.dtype).max:g}, the largest of "
            f"{label}, in the differential model; use --dtype float32"
        )
    return converted
