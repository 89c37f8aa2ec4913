"""diffbit's own layout: `<linear>.codes` (packed), `<linear>.scale` (fp16 for integers, whose scales were rounded to
fp16; fp32 for nf4, fp4 and ternary; uint8 for mxfp4 and nvfp4), in nvfp4 `<linear>.tensor_scale` (fp32) and, in
asymmetric formats, `<linear>.zero` (packed). config.json has

    "quantization_config": {"quantizer": "diffbit", "version": 1, "scheme": {...}}

without a quant_method, so transformers raises an error for the folder. With a quant_method that it does not know it
would warn and load random weights. Folders of earlier versions, with quant_method "diffbit", can still be read.
"""

from __future__ import annotations

from ...formats import Format, QTensor
from ...io.errors import DiffbitError
from ...models import Checkpoint
from ...models.checkpoint.names import reorder
from ..scheme import Scheme, weight_shapes
from . import Layout

PARTS = ("codes", "scale", "tensor_scale", "zero")


def scheme(checkpoint: Checkpoint) -> Scheme:
    return Scheme.from_entry(checkpoint.quantization or {}, f"{checkpoint.path / 'config.json'}: quantization_config")


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    names = {part: f"{module}.{part}" for part in format.parts}
    if f"{module}.weight" in checkpoint.names or not all(name in checkpoint.names for name in names.values()):
        raise DiffbitError(
            f"{checkpoint.path}: the scheme in config.json says that {module}.weight is {format}, but the weights "
            "have it in another form; config and weights do not belong together"
        )
    shape = weight_shapes(checkpoint.config)[module]
    order = checkpoint.row_order(f"{module}.weight") if format.by_columns else None
    parts = {part: reorder(checkpoint.read_raw(name), order) for part, name in names.items()}
    return QTensor.from_packed(format, shape, **parts)


LAYOUT = Layout("diffbit", PARTS, scheme, read)
