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

Another lambda to start from goes into b, and o_proj is divided by 1 - lambda: what both maps agree on keeps its size.

Where a norm follows the heads (BitNet's sub-norms), o_proj comes too late: the norm's epsilon has seen a/2. Such a
model has v_proj doubled instead.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ...io.errors import DiffbitError
from ...models import Checkpoint, ModelConfig, attention_options
from ._target import checked, float_model

STARTS = ("copy", "rotated")
LAMBDA_BIAS = -6.0  # of a rotated start


@dataclass(frozen=True)
class _Start:
    """What a layer begins with: the noise query's angle (None: the signal query itself), b (None: there is none), and
    the factor of o_proj."""

    angle: float | None
    bias: float | None
    factor: float

    @classmethod
    def of(cls, start: str, angle: float, lambda_start: float | None) -> _Start:
        turn = None if start == "copy" else angle
        if lambda_start is not None:
            return cls(turn, math.log(lambda_start / (1 - lambda_start)), 1 / (1 - lambda_start))
        return cls(turn, None, 2.0) if start == "copy" else cls(turn, LAMBDA_BIAS, 1.0)


@dataclass(frozen=True)
class ToDifferential:
    """start: "copy" or "rotated" (above); None: "copy". angle: of a rotated start, in degrees; None: 90. lambda_start:
    in (0, 1); None: 1/2 for a copy, 0.0025 for a rotated start, whose o_proj stays as it is."""

    start: str | None = None
    angle: float | None = None
    lambda_start: float | None = None

    def __post_init__(self) -> None:
        if self.start not in (None, *STARTS):
            raise DiffbitError(f"start is {self.start!r}, wanted one of {', '.join(STARTS)}")
        if self.angle is not None and (self.start != "rotated" or not math.isfinite(self.angle)):
            raise DiffbitError(f"angle is {self.angle}, wanted a number of degrees of a rotated start")
        if self.lambda_start is not None and not 0 < self.lambda_start < 1:
            raise DiffbitError(f"lambda starts at {self.lambda_start}, wanted a number between 0 and 1")

    @property
    def begin(self) -> _Start:
        return _Start.of(self.start or "copy", 90.0 if self.angle is None else self.angle, self.lambda_start)

    def config(self, source: Checkpoint) -> ModelConfig:
        return _differential(source, lambda_bias=self.begin.bias is not None)

    def layer(self, source: Checkpoint, config: ModelConfig, index: int, tensors: dict[str, Tensor]) -> None:
        _convert_layer(source, config, index, tensors, self.begin)


def _differential(source: Checkpoint, lambda_bias: bool) -> ModelConfig:
    """Return the differential model's config; raises DiffbitError for a model that cannot be converted."""
    float_model(source)
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
    source: Checkpoint, config: ModelConfig, index: int, tensors: dict[str, Tensor], begin: _Start
) -> None:
    """Change a plain layer's tensors to those of the differential one, in place."""
    attention = f"model.layers.{index}.self_attn."
    pairs = config.layers[index].mixer.softmaxes // 2
    query = tensors[f"{attention}q_proj.weight"]
    tensors[f"{attention}lambda_proj.weight"] = query.new_zeros(pairs, config.hidden_size)
    if begin.bias is not None:
        tensors[f"{attention}lambda_proj.bias"] = query.new_full((pairs,), begin.bias)
    if begin.angle is not None:
        _check_angle(source, tensors.get(f"{attention}q_norm.weight"), index, begin.angle)
    for name in (f"{attention}q_proj.weight", f"{attention}q_proj.bias"):
        if name in tensors:
            heads = tensors[name].unflatten(0, (pairs, -1))  # [H, d, E], or [H, d]
            noise = heads if begin.angle is None else _turned(heads, begin.angle)
            tensors[name] = torch.stack((heads, noise), 1).flatten(0, 2)  # [2 H d, E], the queries of a pair adjacent
    sub_norms = any(layer.sub_norms for layer in config.layers)
    for part in ("v_proj.weight", "v_proj.bias") if sub_norms else ("o_proj.weight",):
        if (name := attention + part) in tensors and begin.factor != 1:
            tensors[name] = checked(source, name, begin.factor * tensors[name], None)


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
