"""Low-bit weights: number formats, methods that round to them, schemes that choose a format per module, checkpoints.

report = quantize_checkpoint("model", "model-int4", Scheme(weights=parse_format("int4_g128")))
decoder = load("model-int4")                         # reads float, quantized, bitsandbytes and bitnet folders
decoder = apply(float_decoder, scheme)               # the same in memory
"""

from .attention import logits_hook, quantize_logits
from .calibration.stats import CalibStats, proxy_loss
from .checkpoint import load, load_block, quantize_checkpoint, save
from .layerwise import apply
from .layouts import Weights, read_scheme, read_weight
from .methods import Method, methods, parse_recipe
from .methods.rtn import quantize as rtn
from .model import quant_linear
from .report import Report, Sizes, WeightReport, sizes
from .scheme import (
    EMBEDDING_MODULE,
    HEAD_MODULE,
    AttentionScheme,
    Scheme,
    linear_shapes,
    parse_kv,
    parse_override,
    table_formats,
    weight_shapes,
)

__all__ = [
    "EMBEDDING_MODULE",
    "HEAD_MODULE",
    "AttentionScheme",
    "CalibStats",
    "Method",
    "Report",
    "Scheme",
    "Sizes",
    "WeightReport",
    "Weights",
    "apply",
    "linear_shapes",
    "load",
    "load_block",
    "logits_hook",
    "methods",
    "parse_kv",
    "parse_override",
    "parse_recipe",
    "proxy_loss",
    "quant_linear",
    "quantize_checkpoint",
    "quantize_logits",
    "read_scheme",
    "read_weight",
    "rtn",
    "save",
    "sizes",
    "table_formats",
    "weight_shapes",
]
