"""compressed-tensors' layout of integers: llm-compressor writes it, vLLM and transformers read it.

The formats are "pack-quantized" (2 to 8 bits) and "int-quantized" or "naive-quantized" (8 bits):

    <linear>.weight_packed      int32 [N, K*bits/32]      code, a bit stream along each row, low bits first
    <linear>.weight             int8  [N, K]              code - 128
    <linear>.weight_scale       float [N, G], [N, 1] or [1]
    <linear>.weight_zero_point  int32 [N*bits/32, G] packed down each column, or int8 [N, G] (zero - 2^(bits-1))
    <linear>.weight_shape       int64 [2]

config_groups sets the bits and group size of layers by class ("Linear"), name or regular expression ("re:..."). A name
or an expression takes precedence over a class, and `ignore` over both. Inputs that are rounded to int8 at run time,
with one scale per token, become activations "int8" of the scheme. diffbit does not support floats of 4 and 8 bits, 2:4
sparsity, static scales of inputs, a quantized KV cache and transforms, and raises an error for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....formats import Format, IntFormat, QTensor
from ....io.errors import DiffbitError
from ....models import Checkpoint, ModelConfig
from ....quantize import Scheme, linear_shapes
from ....quantize.layouts import Layout
from ._common import about, half, integers, pack_words, part, scheme_of, shape_of, unpack_words, weights_only, words
from .gptq import check_order

METHOD = "compressed-tensors"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")
BITS = (2, 3, 4, 5, 6, 7, 8)
EXPRESSION = re.compile(r"(?!.*\)[*+{])(?!(.*[*+{]){5}).{1,200}")  # limits the time to match a pattern
PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def scheme(checkpoint: Checkpoint) -> Scheme:
    entry = checkpoint.quantization or {}
    groups = _groups(checkpoint, entry)
    ignored = _names(checkpoint, "ignore", entry.get("ignore") or [])
    formats: dict[str, Format | None] = {}
    names = set(checkpoint.names)
    for module in linear_shapes(checkpoint.config):
        packed = f"{module}.weight_packed" in names
        whole = f"{module}.weight" in names and not checkpoint.is_float(f"{module}.weight")
        if not (packed or whole) and f"{module}.weight_scale" not in names:
            formats[module] = None
            continue
        found = [
            format
            for by_name in (True, False)
            for targets, format in groups
            if any(_matches(module, target) if by_name else target == "Linear" for target in targets)
        ]
        if any(_matches(module, name) for name in ignored) or not found:
            raise DiffbitError(
                f"{checkpoint.path}: {module} is quantized, but it is not a target of config_groups in config.json; "
                "config and weights do not belong together"
            )
        formats[module] = found[0]
    return scheme_of(checkpoint, formats, _activations(checkpoint, entry))


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    rows, columns = shape = shape_of(checkpoint, module)
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
    wanted = [(rows, groups), *([(rows,), (1,), (1, 1), ()] if groups == 1 else [])]
    scale = half(part(checkpoint, f"{module}.weight_scale", None, *wanted), f"{checkpoint.path}: {module}.weight_scale")
    if f"{module}.weight_g_idx" in checkpoint.names:
        check_order(checkpoint, f"{module}.weight_g_idx", format, columns)
    zero = None
    if not format.symmetric:
        if name in checkpoint.names and checkpoint.shape(name) == (words(rows, bits), groups):
            zero = unpack_words(
                part(checkpoint, name, torch.int32, checkpoint.shape(name)).T, bits, rows
            ).T.contiguous()
        else:
            zero = _unsigned(part(checkpoint, name, torch.int8, *wanted), offset)
            zero = zero.reshape(-1, groups).expand(rows, groups).contiguous()
    scale = scale.reshape(-1, groups).expand(rows, groups).contiguous()  # stored once, or per row
    return QTensor(format, shape, codes, scale, zero)


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
    inputs = None if scheme.activations is None else PER_TOKEN
    whole = inputs is not None and all(format.bits == 8 for format in by_format)  # vLLM's int8 kernels read this
    return {
        "quant_method": METHOD,
        "format": "int-quantized" if whole else "pack-quantized",
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


def _groups(checkpoint: Checkpoint, entry: Mapping[str, Any]) -> list[tuple[list[str], Format]]:
    """(targets, format) of each entry of config_groups."""
    where = about(checkpoint)
    for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        value = entry.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise DiffbitError(f"{where} has a {name}, which diffbit does not support")
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise DiffbitError(f"{where} has no config_groups with a description of the weights; restore config.json")
    found: list[tuple[list[str], Format]] = []
    for name, group in groups.items():
        args, layout = group.get("weights"), group.get("format") or entry.get("format")
        if layout not in LAYOUTS or not isinstance(args, Mapping) or args.get("type", "int") != "int":
            kind = f"{args.get('type')} of {args.get('num_bits')} bits" if isinstance(args, Mapping) else "none"
            raise DiffbitError(
                f"{where} has weights of format {layout!r} ({kind}) in {name}, wanted integers, {' or '.join(LAYOUTS)}"
            )
        group_size = args.get("group_size") or -1
        strategy = args.get("strategy") or (
            "group" if group_size > 0 else "channel" if args.get("group_size") else "tensor"
        )
        if strategy not in ("group", "channel", "tensor") or args.get("dynamic"):
            raise DiffbitError(f"{where} has weights with strategy {strategy!r}, wanted group, channel or tensor")
        symmetric = bool(args.get("symmetric", True))
        format = integers(checkpoint, args.get("num_bits"), group_size, symmetric, BITS)
        found.append((_names(checkpoint, "targets", group.get("targets")), format))
    return found


def _activations(checkpoint: Checkpoint, entry: Mapping[str, Any]) -> str | None:
    found = []
    for group in entry["config_groups"].values():
        args = group.get("input_activations")
        if group.get("output_activations") is not None:
            raise DiffbitError(f"{about(checkpoint)} has output_activations, which diffbit does not support")
        if args and not isinstance(args, Mapping):
            raise DiffbitError(f"{about(checkpoint)} has input_activations {args!r}, wanted their settings")
        if args and {name: args.get(name, True) for name in PER_TOKEN} != PER_TOKEN:
            raise DiffbitError(
                f"{about(checkpoint)} has input_activations other than int8 with one dynamic scale per token, "
                "which diffbit does not support"
            )
        found.append("int8" if args else None)
    if len(set(found)) > 1:
        raise DiffbitError(f"{about(checkpoint)} rounds the inputs of only some layers, wanted all or none")
    return found[0] if found else None


def _names(checkpoint: Checkpoint, field: str, values: Any) -> list[str]:
    """A list of names and expressions. Raises DiffbitError for an invalid or too complex expression."""
    where = f"{about(checkpoint)} has {field}"
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DiffbitError(f"{where} {values!r}, wanted a list of layers' names")
    for value in values:
        if value.startswith("re:"):
            try:
                re.compile(value[3:])
            except (re.error, RecursionError, OverflowError) as error:
                raise DiffbitError(f"{where} {value!r}, which is not a regular expression ({error})") from None
            if not EXPRESSION.fullmatch(value[3:]):
                raise DiffbitError(f"{where} {value!r}, wanted a simpler expression")
    return values


def _matches(module: str, target: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _signed(codes: Tensor) -> Tensor:
    """The inverse of `_unsigned` for 8 bits."""
    return (codes.short() - 128).to(torch.int8)


def _unsigned(signed: Tensor, offset: int) -> Tensor:
    return (signed.short() + offset).to(torch.uint8)


LAYOUT = Layout(METHOD, PARTS, scheme, read, settings, pack)
