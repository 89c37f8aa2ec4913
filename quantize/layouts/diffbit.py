"""diffbit's own: `<linear>.codes` (packed), `<linear>.scale` (as its format writes it: fp16 for integers, to which they
were rounded beforehand, fp32 for nf4, fp4 and ternary, uint8 for mxfp4) and, in asymmetric formats, `<linear>.zero`
(packed). config.json says

    "quantization_config": {"quantizer": "diffbit", "version": 1, "scheme": {...}}

without a quant_method, so that transformers refuses the folder: with one that it does not know it warns, and loads
random weights. Folders of earlier versions, with quant_method "diffbit", are read all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import DiffbitError
from ...models import Checkpoint
from ..formats import Format, QTensor
from ..scheme import Scheme, weight_shapes
from ._common import about

METHOD = "diffbit"
PARTS = ("codes", "scale", "zero")
VERSION = 1


def scheme(checkpoint: Checkpoint) -> Scheme:
    return parse_entry(checkpoint.quantization or {}, about(checkpoint))


def parse_entry(entry: Mapping[str, Any], where: str) -> Scheme:
    """Return the scheme in the quantization_config that diffbit writes; where: its file and key, for errors."""
    if entry.get("version") != VERSION:
        raise DiffbitError(
            f"{where} has version {entry.get('version')!r}, this diffbit reads version {VERSION}; quantize the float "
            "checkpoint again"
        )
    if not isinstance(entry.get("scheme"), dict):
        raise DiffbitError(f"{where} has no scheme; restore config.json")
    try:
        return Scheme.from_dict(entry["scheme"])
    except DiffbitError as error:
        raise DiffbitError(f"{where}: {error}") from None


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    wanted = PARTS[:2] if format.symmetric else PARTS
    names = [f"{module}.{part}" for part in wanted]
    if f"{module}.weight" in checkpoint.names or not all(name in checkpoint.names for name in names):
        raise DiffbitError(
            f"{checkpoint.path}: the scheme in config.json says that {module}.weight is {format}, but the weights hold "
            "it otherwise; config and weights do not belong together"
        )
    shape = weight_shapes(checkpoint.config)[module]
    return QTensor.from_packed(format, shape, *(checkpoint.read_raw(name) for name in names))
