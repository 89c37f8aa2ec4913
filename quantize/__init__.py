"""Low-bit weights: number formats, methods that round to them, schemes that choose a format per module, checkpoints.

report = quantize_checkpoint("model", "model-int4", Scheme(weights=parse_format("int4_g128")))
decoder = load("model-int4")                         # reads float, quantized, bitsandbytes and bitnet folders
decoder = apply(float_decoder, scheme)               # the same in memory

The packages methods, calibration and layouts have faces of their own.
"""

from .checkpoint import load, load_block, quantize_checkpoint, save
from .device_cache import step_bytes
from .format_name import average_bits, format_name
from .layer import as_exported, quant_linear
from .layerwise import apply, plan_for
from .layouts import Weights, read_scheme, read_weight
from .plan import Plan, resolve
from .report import REPORT_FILE, Report, WeightReport
from .scheme import (
    EMBEDDING_MODULE,
    HEAD_MODULE,
    KV,
    LOGIT_BITS,
    QK,
    AttentionScheme,
    Scheme,
    linear_shapes,
    table_formats,
)
from .sizes import Sizes, sizes

__all__ = [
    "EMBEDDING_MODULE", "HEAD_MODULE", "KV", "LOGIT_BITS", "QK", "REPORT_FILE", "AttentionScheme", "Plan", "Report",
    "Scheme", "Sizes", "WeightReport", "Weights", "apply", "as_exported", "average_bits", "format_name",
    "linear_shapes", "load", "load_block", "plan_for", "quant_linear", "quantize_checkpoint", "read_scheme",
    "read_weight", "resolve", "save", "sizes", "step_bytes", "table_formats",
]  # fmt: skip
