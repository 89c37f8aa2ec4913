"""AWQ's layout, written by AutoAWQ and GPTQModel (arXiv 2306.00978): 4 bits with zero points.

Version "gemm" is packed along out_features; field j of a word holds column ORDER[j] of its eight:

    <linear>.qweight   int32 [K, N/8]
    <linear>.qzeros    int32 [G, N/8]
    <linear>.scales    float [G, N]

Version "gemv" is packed along in_features in order; the rows of zero points and scales are padded at the end:

    <linear>.qweight   int32 [N, K/8]
    <linear>.qzeros    int32 [N, W]
    <linear>.scales    float [N, 8 W]

weight = scale * (code - zero). diffbit only reads this layout; compressed-tensors can hold the same numbers.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ...formats import Format, IntFormat, QTensor
from ...io.errors import DiffbitError
from ...io.fields import one_of
from ...models import Checkpoint
from ..scheme import Scheme
from . import Layout
from ._common import GroupSize, half, part, scheme_of_packed, setting, shape_of, unpack_words

METHOD = "awq"
PARTS = ("qweight", "qzeros", "scales")
BITS, FIELDS = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
VERSIONS = ("gemm", "gemv")


def scheme(checkpoint: Checkpoint) -> Scheme:
    _version(checkpoint)
    setting(checkpoint, _first(checkpoint, "bits", "w_bit"), Annotated[int, one_of(BITS)])
    group_size = setting(checkpoint, _first(checkpoint, "group_size", "q_group_size"), GroupSize)
    return scheme_of_packed(checkpoint, IntFormat.create(BITS, max(group_size, 0), symmetric=False))


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    rows, columns = shape_of(checkpoint, module)
    groups = format.groups(columns)
    if columns % (format.group_size or FIELDS) or rows % FIELDS:
        raise DiffbitError(f"is {rows} x {columns}, which an awq folder with groups of {format.group_size} cannot hold")
    qweight, qzeros, scales = (f"{module}.{name}" for name in PARTS)
    if _version(checkpoint) == "gemm":
        codes = _in_order(part(checkpoint, qweight, torch.int32, (columns, rows // FIELDS)), rows).T
        zero = _in_order(part(checkpoint, qzeros, torch.int32, (groups, rows // FIELDS)), rows).T
        scale = part(checkpoint, scales, None, (groups, rows)).T
    else:
        codes = unpack_words(part(checkpoint, qweight, torch.int32, (rows, columns // FIELDS)), BITS, columns)
        width = _padded(groups, format.group_size)
        zero = unpack_words(part(checkpoint, qzeros, torch.int32, (rows, width)), BITS, groups)
        scale = part(checkpoint, scales, None, (rows, width * FIELDS))[:, :groups]
    scale = half(scale, f"{checkpoint.path}: {scales}").contiguous()
    return QTensor(format, (rows, columns), codes.contiguous(), scale, zero.contiguous())


def _in_order(packed: Tensor, rows: int) -> Tensor:
    """Unpack version "gemm": int32 [n, N/8] -> uint8 [n, N]."""
    fields = unpack_words(packed, BITS, rows).unflatten(1, (-1, FIELDS))
    return fields[..., torch.tensor(ORDER).argsort()].flatten(1)


def _padded(groups: int, group_size: int) -> int:
    """Return the int32 words of a row's zero points in "gemv": a multiple of 4 for groups of 32, of 2 for 64."""
    multiple = FIELDS * (max(1, 128 // group_size) if group_size else 1)
    return -(-groups // multiple) * multiple // FIELDS


def _version(checkpoint: Checkpoint) -> str:
    name = _first(checkpoint, "version", "checkpoint_format", "format")
    version = Annotated[str, one_of(*VERSIONS, *map(str.upper, VERSIONS), words=f"one of {', '.join(VERSIONS)}")]
    return str(setting(checkpoint, name, version, VERSIONS[0])).lower()


def _first(checkpoint: Checkpoint, *names: str) -> str:
    """Return the first of these names that the quantization_config has, or the first."""
    return next((name for name in names if name in (checkpoint.quantization or {})), names[0])


LAYOUT = Layout("awq", PARTS, scheme, read)
