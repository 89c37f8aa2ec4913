"""GPTQ's layout (arXiv 2210.17323): GPTQModel, AutoGPTQ and optimum write it, vLLM and transformers read it.

    <linear>.qweight   int32 [K*bits/32, N]         codes; a bit stream down each column, low bits first
    <linear>.qzeros    int32 [G, N*bits/32]         zero points, a bit stream along each row
    <linear>.scales    float [G, N]
    <linear>.g_idx     int32 [K]                    the group of each column of the weight

weight = scale * (code - zero). "gptq" (version 1) stores zero - 1. GPTQModel subtracts 1 from all fields of a word at
once, so a zero point of 0 borrows from the field above; a word is read accordingly, but at 3 bits each field by itself.
"gptq_v2" stores zero. If "sym" is true, every zero point is 2^(bits-1). With desc_act a group may consist of any
columns; diffbit raises an error unless they are consecutive, because a device's product reads a group's weights side by
side. AutoGPTQ adds a bias of zeros to layers without one.

diffbit writes symmetric weights as "gptq", which every reader supports, and others as "gptq_v2".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from ...formats import Format, IntFormat, QTensor
from ...io.errors import DiffbitError
from ...io.fields import one_of
from ...models import Checkpoint, ModelConfig
from ..scheme import HEAD_MODULE, Scheme, linear_shapes
from . import Layout
from ._common import (
    GroupSize,
    about,
    half,
    one_format,
    pack_words,
    part,
    scheme_of_packed,
    setting,
    shape_of,
    unpack_words,
    words,
)

METHOD = "gptq"
PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
Bits = Annotated[int, one_of(*BITS)]
VERSIONS = ("gptq", "gptq_v2")


def scheme(checkpoint: Checkpoint) -> Scheme:
    _version(checkpoint)
    dynamic = setting(checkpoint, "dynamic", Mapping[str, Any], {})
    if changed := [name for name in dynamic if not name.startswith("-:")]:
        raise DiffbitError(
            f"{about(checkpoint)} has different bits or groups for some layers (dynamic: {changed[0]}), which diffbit "
            "does not support"
        )
    bits, group_size = setting(checkpoint, "bits", Bits), setting(checkpoint, "group_size", GroupSize, 128)
    format = IntFormat.create(bits, max(group_size, 0), setting(checkpoint, "sym", bool, True))
    return scheme_of_packed(checkpoint, format)


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    rows, columns = shape = shape_of(checkpoint, module)
    bits, groups = format.bits, format.groups(columns)
    packed = part(checkpoint, f"{module}.qweight", torch.int32, (words(columns, bits), rows))
    zeros = part(checkpoint, f"{module}.qzeros", torch.int32, (groups, words(rows, bits)))
    scale = half(part(checkpoint, f"{module}.scales", None, (groups, rows)), f"{checkpoint.path}: {module}.scales").T
    if f"{module}.g_idx" in checkpoint.names:
        check_order(checkpoint, f"{module}.g_idx", format, columns)
    zero = _zeros(zeros, bits, rows, _version(checkpoint)).T
    if format.symmetric and (zero != 2 ** (bits - 1)).any():
        raise DiffbitError(
            f"{about(checkpoint)} has sym: true, but {module}.qzeros has zero points other than {2 ** (bits - 1)}; "
            'set sym to false, or "checkpoint_format" to the version in which the folder was written'
        )
    codes = unpack_words(packed.T, bits, columns)
    return QTensor(format, shape, codes, scale.contiguous(), None if format.symmetric else zero.contiguous())


def settings(config: ModelConfig, scheme: Scheme) -> dict[str, Any]:
    format, floats = one_format(config, scheme, METHOD)
    if scheme.activations is not None:
        raise DiffbitError("its activations are quantized, which a gptq folder cannot hold; use compressed-tensors")
    if not isinstance(format, IntFormat) or format.bits not in BITS:
        raise DiffbitError(f"its weights are {format}, wanted integers of 2, 3, 4 or 8 bits for a gptq folder")
    for module, (rows, columns) in linear_shapes(config).items():
        if module not in floats and (rows * format.bits % 32 or columns * format.bits % 32):
            raise DiffbitError(
                f"{module} is {rows} x {columns}, whose {format.bits}-bit codes do not fill 32-bit words, as a gptq "
                "folder requires; use compressed-tensors"
            )
    skipped = [f"-:{module.replace('.', chr(92) + '.')}$" for module in floats if module != HEAD_MODULE]
    return {
        "quant_method": METHOD,
        "bits": format.bits,
        "group_size": format.group_size or -1,
        "sym": format.symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": VERSIONS[not format.symmetric],
        "pack_dtype": "int32",
        **({"dynamic": {name: {} for name in skipped}} if skipped else {}),
    }


def pack(weight: QTensor, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    columns, bits, group = weight.shape[1], weight.format.bits, weight.format.group_size
    zero = weight.zero
    if zero is None:  # stored minus one: version 1
        zero = weight.codes.new_full(tuple(weight.scale.shape), 2 ** (bits - 1) - 1)
    return {
        "qweight": pack_words(weight.codes, bits).T,
        "qzeros": pack_words(zero.T.contiguous(), bits),
        "scales": weight.scale.half().T,
        "g_idx": torch.arange(columns, dtype=torch.int32) // (group or columns),
    }


def check_order(checkpoint: Checkpoint, name: str, format: Format, columns: int) -> None:
    """Raise DiffbitError for groups whose columns do not lie side by side."""
    groups = part(checkpoint, name, torch.int32, (columns,))
    if not torch.equal(groups, torch.arange(columns, dtype=torch.int32) // (format.group_size or columns)):
        raise DiffbitError(
            f"{checkpoint.path}: tensor {name} gives a group columns that do not lie side by side (desc_act), which "
            "diffbit does not support; quantize the float checkpoint with diffbit quantize --method gptq"
        )


def _version(checkpoint: Checkpoint) -> str:
    setting(checkpoint, "pack_dtype", Annotated[str, one_of("int32")], None)
    if setting(checkpoint, "is_marlin_format", bool, False):
        raise DiffbitError(f"{about(checkpoint)} has is_marlin_format true, and Marlin's layout is not read")
    name = "checkpoint_format" if (checkpoint.quantization or {}).get("checkpoint_format") else "format"
    return str(setting(checkpoint, name, Annotated[str, one_of(*VERSIONS)], VERSIONS[0]))


def _zeros(stored: Tensor, bits: int, rows: int, version: str) -> Tensor:
    """Unpack zero points uint8 [G, N]."""
    shift = 0 if version != VERSIONS[0] else 1
    if 32 % bits == 0:  # add one in each field of a word, which wraps around
        stored = (stored.long() + shift * sum(1 << at for at in range(0, 32, bits))).to(torch.int32)
        return unpack_words(stored, bits, rows)
    return (unpack_words(stored, bits, rows) + shift) & (2**bits - 1)


LAYOUT = Layout(METHOD, PARTS, scheme, read, settings, pack)
