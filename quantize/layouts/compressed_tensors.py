"""compressed-tensors' layout of integers and nvfp4: llm-compressor writes it, vLLM and transformers read it.

The formats are "pack-quantized" (2 to 8 bits), "int-quantized" or "naive-quantized" (8 bits), and
"nvfp4-pack-quantized" (floats of 4 bits, formats/nvfp4.py), which is only read:

    <linear>.weight_packed      int32 [N, K*bits/32]      code, a bit stream along each row, low bits first
    <linear>.weight             int8  [N, K]              code - 128
    <linear>.weight_scale       float [N, G], [N, 1] or [1]
    <linear>.weight_zero_point  int32 [N*bits/32, G] packed down each column, or int8 [N, G] (zero - 2^(bits-1))
    <linear>.weight_shape       int64 [2]

    <linear>.weight_packed      uint8 [N, K/2]            of nvfp4: two codes a byte, the first in the low bits
    <linear>.weight_scale       E4M3  [N, K/16]
    <linear>.weight_global_scale  fp32 [1]                1 / tensor_scale

config_groups sets the bits and group size of layers by class ("Linear"), name or regular expression ("re:..."). A name
or an expression takes precedence over a class, and `ignore` over both. Inputs that are rounded to int8 at run time,
with one scale per token, become activations "int8" of the scheme. diffbit does not support other floats of 4 and 8
bits, 2:4 sparsity, static scales of inputs, a quantized KV cache and transforms, and raises an error for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from ...formats import Format, IntFormat, QTensor, parse_format
from ...io.errors import DiffbitError
from ...io.fields import Rule, one_of
from ...models import Checkpoint, ModelConfig
from ..scheme import Scheme, linear_shapes
from . import Layout
from ._common import (
    GroupSize,
    about,
    half,
    pack_words,
    part,
    scheme_of,
    setting,
    shape_of,
    unpack_words,
    weights_only,
    words,
)
from .gptq import check_order

METHOD = "compressed-tensors"
NVFP4 = parse_format("nvfp4")
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision")
StorageFormat = Annotated[str, one_of(*LAYOUTS)]
BITS = (2, 3, 4, 5, 6, 7, 8)
EXPRESSION = re.compile(r"(?!.*\)[*+{])(?!(.*[*+{]){5}).{1,200}")  # limits the time to match a pattern


def _is_name(name: str) -> bool:
    try:
        return not name.startswith("re:") or (EXPRESSION.fullmatch(name[3:]) and re.compile(name[3:])) is not None
    except (re.error, RecursionError, OverflowError):
        return False


LayerName = Annotated[str, Rule("a layer's name, or re: and a simple regular expression", _is_name)]


@dataclass(frozen=True)
class WeightArguments:
    """How the weights of a group are stored; strategy None: as group_size says."""

    num_bits: Annotated[int, one_of(*BITS)]
    type: Annotated[str, one_of("int", "float")] = "int"
    strategy: Annotated[str, one_of("group", "channel", "tensor", "tensor_group")] | None = None
    group_size: GroupSize | None = None
    symmetric: bool = True
    dynamic: Annotated[bool, one_of(False)] | None = False

    def __post_init__(self) -> None:
        is_nvfp4 = (self.num_bits, self.group_size, self.strategy) == (4, NVFP4.group_size, "tensor_group")
        if (self.type == "float" or self.strategy == "tensor_group") and not (is_nvfp4 and self.symmetric):
            raise DiffbitError(
                f"weights are {self.num_bits}-bit {self.type} of strategy {self.strategy} and group_size "
                f"{self.group_size}, wanted integers, or nvfp4: 4-bit float, tensor_group, 16, symmetric"
            )

    @property
    def format(self) -> Format:
        if self.type == "float":
            return NVFP4
        return IntFormat.create(self.num_bits, max(self.group_size or 0, 0), self.symmetric)


@dataclass(frozen=True)
class InputArguments:
    """Inputs rounded at run time to int8, with one scale per token."""

    num_bits: Annotated[int, one_of(8)]
    type: Annotated[str, one_of("int")]
    strategy: Annotated[str, one_of("token")]
    dynamic: Annotated[bool, one_of(True)] = True
    symmetric: Annotated[bool, one_of(True)] = True


@dataclass(frozen=True)
class LayerGroup:
    """An entry of config_groups. format None: that of the quantization_config."""

    weights: WeightArguments
    targets: tuple[LayerName, ...]
    format: StorageFormat | None = None
    input_activations: InputArguments | None = None
    output_activations: None = None


def scheme(checkpoint: Checkpoint) -> Scheme:
    groups = _groups(checkpoint)
    ignored = setting(checkpoint, "ignore", tuple[LayerName, ...], ())
    formats: dict[str, Format | None] = {}
    names = set(checkpoint.names)
    for module in linear_shapes(checkpoint.config):
        packed = f"{module}.weight_packed" in names
        unpacked = f"{module}.weight" in names and not checkpoint.is_float(f"{module}.weight")
        if not (packed or unpacked) and f"{module}.weight_scale" not in names:
            formats[module] = None
            continue
        matching = [
            group.weights.format
            for by_name in (True, False)
            for group in groups
            if any(_matches(module, target) if by_name else target == "Linear" for target in group.targets)
        ]
        if any(_matches(module, name) for name in ignored) or not matching:
            raise DiffbitError(
                f"{checkpoint.path}: {module} is quantized, but it is not a target of config_groups in config.json; "
                "config and weights do not belong together"
            )
        formats[module] = matching[0]
    if len({group.input_activations for group in groups}) > 1:
        raise DiffbitError(f"{about(checkpoint)} rounds the inputs of only some layers, wanted all or none")
    return scheme_of(checkpoint, formats, "int8" if groups and groups[0].input_activations else None)


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    rows, columns = shape = shape_of(checkpoint, module)
    if format.tensor_scaled:
        return _nvfp4(checkpoint, module, shape)
    bits, groups, offset = format.bits, format.groups(columns), 2 ** (format.bits - 1)
    packed, name = f"{module}.weight_packed", f"{module}.weight_zero_point"
    if packed in checkpoint.names:
        stored = part(checkpoint, packed, torch.int32, (rows, words(columns, bits)))
        codes = unpack_words(stored, bits, columns)
        sizes = part(checkpoint, f"{module}.weight_shape", torch.int64, (2,)).tolist()
        if tuple(sizes) != shape:
            raise DiffbitError(f"{checkpoint.path}: {module}.weight_shape is {sizes}, wanted {list(shape)}")
    else:
        codes = _unsigned(part(checkpoint, f"{module}.weight", torch.int8, shape), offset)
        if bits < 8 and (codes >= 2**bits).any():
            raise DiffbitError(f"{checkpoint.path}: tensor {module}.weight has numbers of more than {bits} bits")
    shapes = [(rows, groups), *([(rows,), (1,), (1, 1), ()] if groups == 1 else [])]
    scale = half(part(checkpoint, f"{module}.weight_scale", None, *shapes), f"{checkpoint.path}: {module}.weight_scale")
    if f"{module}.weight_g_idx" in checkpoint.names:
        check_order(checkpoint, f"{module}.weight_g_idx", format, columns)
    zero = None
    if not format.symmetric:
        if name in checkpoint.names and checkpoint.shape(name) == (words(rows, bits), groups):
            zero = unpack_words(
                part(checkpoint, name, torch.int32, checkpoint.shape(name)).T, bits, rows
            ).T.contiguous()
        else:
            zero = _unsigned(part(checkpoint, name, torch.int8, *shapes), offset)
            zero = zero.reshape(-1, groups).expand(rows, groups).contiguous()
    scale = scale.reshape(-1, groups).expand(rows, groups).contiguous()  # stored once, or per row
    return QTensor(format, shape, codes, scale, zero)


def _nvfp4(checkpoint: Checkpoint, module: str, shape: tuple[int, int]) -> QTensor:
    format, (rows, columns) = NVFP4, shape
    format.check(shape)  # of whole blocks
    scale = part(checkpoint, f"{module}.weight_scale", torch.float8_e4m3fn, (rows, format.groups(columns)))
    return QTensor.from_packed(
        format,
        shape,
        part(checkpoint, f"{module}.weight_packed", torch.uint8, format.packed_shape(shape)),
        scale.view(torch.uint8),
        tensor_scale=1 / part(checkpoint, f"{module}.weight_global_scale", torch.float32, (1,)).view(1, 1),
    )


def settings(config: ModelConfig, scheme: Scheme) -> dict[str, Any]:
    formats = weights_only(config, scheme, METHOD)
    by_format: dict[Format, list[str]] = {}
    for module, format in formats.items():
        columns = linear_shapes(config)[module][1]
        if not isinstance(format, IntFormat):
            raise DiffbitError(f"{module} is {format}, wanted integers of 2 to 8 bits for a compressed-tensors folder")
        if columns % (format.group_size or 1):
            raise DiffbitError(
                f"{module} has {columns} in_features, wanted a multiple of {format.group_size} for a "
                "compressed-tensors folder, which has no partial groups"
            )
        by_format.setdefault(format, []).append(module)
    if scheme.activations not in (None, "int8"):
        raise DiffbitError(f"its activations are {scheme.activations}, wanted int8 or float")
    inputs = None if scheme.activations is None else asdict(InputArguments(8, "int", "token"))
    is_int8 = inputs is not None and all(format.bits == 8 for format in by_format)  # vLLM's int8 kernels read this
    return {
        "quant_method": METHOD,
        "format": "int-quantized" if is_int8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": ["Linear"] if len(by_format) == 1 else modules,
                "weights": {
                    "num_bits": format.bits,
                    "type": "int",
                    "symmetric": format.symmetric,
                    "strategy": "group" if format.group_size else "channel",
                    "group_size": format.group_size or None,
                    "dynamic": False,
                },
                "input_activations": inputs,
                "output_activations": None,
            }
            for index, (format, modules) in enumerate(by_format.items())
        },
        "ignore": [module for module in linear_shapes(config) if module not in formats],
    }


def pack(weight: QTensor, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    bits, scale = weight.format.bits, {"weight_scale": weight.scale.half()}
    if entry["format"] == "int-quantized":
        zero = {} if weight.zero is None else {"weight_zero_point": _signed(weight.zero)}
        return {"weight": _signed(weight.codes), **scale, **zero}
    zero = {} if weight.zero is None else {"weight_zero_point": pack_words(weight.zero.T.contiguous(), bits).T}
    return {
        "weight_packed": pack_words(weight.codes, bits),
        **scale,
        "weight_shape": torch.tensor(weight.shape),
        **zero,
    }


def _groups(checkpoint: Checkpoint) -> list[LayerGroup]:
    """Read config_groups."""
    for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        value = (checkpoint.quantization or {}).get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise DiffbitError(f"{about(checkpoint)} has a {name}, which diffbit does not support")
    layout = setting(checkpoint, "format", StorageFormat, None)
    groups = setting(checkpoint, "config_groups", Mapping[str, LayerGroup])
    if layout is None and any(group.format is None for group in groups.values()):
        setting(checkpoint, "format", StorageFormat)
    return list(groups.values())


def _matches(module: str, target: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _signed(codes: Tensor) -> Tensor:
    """Invert `_unsigned` for 8 bits."""
    return (codes.short() - 128).to(torch.int8)


def _unsigned(signed: Tensor, offset: int) -> Tensor:
    return (signed.short() + offset).to(torch.uint8)


LAYOUT = Layout(METHOD, PARTS, scheme, read, settings, pack)
