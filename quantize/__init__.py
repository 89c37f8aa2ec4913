"""Low-bit weights: number formats, methods that round to them, schemes that choose a format per module, checkpoints.

report = quantize_checkpoint("model", "model-int4", Scheme(weights=parse_format("int4_g128")))
decoder = load("model-int4")                         # reads float, quantized, bitsandbytes and bitnet folders
decoder = apply(float_decoder, scheme)               # the same in memory
"""

from ..formats import CodebookFormat, Format, IntFormat, MXFormat, QTensor, TernaryFormat, parse_format
from ..formats.linear import QuantEmbedding, QuantLinear
from ..formats.rounding import Rounding, quantize_per_block_int8, quantize_per_token_int8, rounded_input, spread
from .attention import logits_hook, quantize_logits
from .calibration.stats import CalibStats, proxy_loss
from .checkpoint import load, load_block, quantize_checkpoint, read_scheme, read_weight, save
from .layerwise import apply
from .method import Method
from .methods import methods
from .methods.rtn import quantize as rtn
from .model import quant_linear
from .recipe import parse_recipe
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
    "CodebookFormat",
    "Format",
    "IntFormat",
    "MXFormat",
    "Method",
    "QTensor",
    "QuantEmbedding",
    "QuantLinear",
    "Report",
    "Rounding",
    "Scheme",
    "Sizes",
    "TernaryFormat",
    "WeightReport",
    "apply",
    "linear_shapes",
    "load",
    "load_block",
    "logits_hook",
    "methods",
    "parse_format",
    "parse_kv",
    "parse_override",
    "parse_recipe",
    "proxy_loss",
    "quant_linear",
    "quantize_checkpoint",
    "quantize_logits",
    "quantize_per_block_int8",
    "quantize_per_token_int8",
    "read_scheme",
    "read_weight",
    "rounded_input",
    "rtn",
    "save",
    "sizes",
    "spread",
    "table_formats",
    "weight_shapes",
]
