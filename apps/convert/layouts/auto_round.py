"""AutoRound's folders (arXiv 2309.05516, github.com/intel/auto-round), whose codes have the packing of another library:
"auto_round:auto_gptq" GPTQ's, "auto_round:auto_awq" AutoAWQ's. diffbit only reads them; AutoRound's other packings are
refused."""

from __future__ import annotations

from typing import Annotated

from ....formats import Format, QTensor
from ....io.errors import DiffbitError
from ....io.fields import one_of
from ....models import Checkpoint
from ....quantize import Scheme
from ....quantize.layouts import Layout
from . import awq, gptq
from ._common import about, setting

METHOD = "auto-round"
PACKINGS = {
    "auto_round:auto_gptq": gptq.LAYOUT, "auto_round:gptqmodel": gptq.LAYOUT, "auto_round:auto_awq": awq.LAYOUT,
}  # fmt: skip


def scheme(checkpoint: Checkpoint) -> Scheme:
    if setting(checkpoint, "data_type", str, "int") != "int" or setting(checkpoint, "act_bits", int, 16) < 16:
        raise DiffbitError(f"{about(checkpoint)} has weights or activations other than integers and floats")
    return _packing(checkpoint).scheme(checkpoint)


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    return _packing(checkpoint).read(checkpoint, module, format)


def _packing(checkpoint: Checkpoint) -> Layout:
    kind = Annotated[str, one_of(*PACKINGS)]
    return PACKINGS[setting(checkpoint, "packing_format", kind, "auto_round:auto_gptq")]


LAYOUT = Layout(METHOD, gptq.PARTS, scheme, read)
