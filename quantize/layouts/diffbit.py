"""diffbit's own layout: `<linear>.codes` (packed), `<linear>.scale` (fp16 for integers, whose scales were rounded to
fp16; fp32 for nf4, fp4 and ternary; uint8 for mxfp4) and, in asymmetric formats, `<linear>.zero` (packed). config.json
has

    "quantization_config": {"quantizer": "diffbit", "version": 1, "scheme": {...}}

without a quant_method, so transformers raises an error for the folder. With a quant_method that it does not know it
would warn and load random weights. Folders of earlier versions, with quant_method "diffbit", can still be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...formats import Format, QTensor
from ...io.errors import DiffbitError
from ...io.fields import get, located, shown
from ...models import Checkpoint
from ..scheme import Scheme, weight_shapes
from ._common import about

METHOD = "diffbit"
PARTS = ("codes", "scale", "zero")
VERSION = 1


def scheme(checkpoint: Checkpoint) -> Scheme:
    return parse_entry(checkpoint.quantization or {}, about(checkpoint))


def parse_entry(entry: Mapping[str, Any], where: str) -> Scheme:
    """Return the scheme in a quantization_config that diffbit wrote; where: its file and key, for messages."""
    if entry.get("version") != VERSION:
        raise DiffbitError(
            f"{where} has version {shown(entry.get('version'))}, this diffbit reads version {VERSION}; quantize the "
            "float checkpoint again"
        )
    values = get(entry, "scheme", Mapping[str, Any], place=where)
    with located(f"{where}.scheme"):
        return Scheme.from_dict(values)


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    names = [f"{module}.{part}" for part in (PARTS[:2] if format.symmetric else PARTS)]
    if f"{module}.weight" in checkpoint.names or not all(name in checkpoint.names for name in names):
        raise DiffbitError(
            f"{checkpoint.path}: the scheme in config.json says that {module}.weight is {format}, but the weights "
            "have it in another form; config and weights do not belong together"
        )
    shape = weight_shapes(checkpoint.config)[module]
    return QTensor.from_packed(format, shape, *(checkpoint.read_raw(name) for name in names))
