"""The parts of an artifact: the bytes of its files by kind of content, read from the files.

    int4_g32 codes    and so on, one part per format, in the bits that the operator reads
    scales            and zero points
    embedding         one row is read per token; "embedding, head" if the head is the same table. Quantized
                      tables are "embedding int8 codes", and so on
    head              likewise
    float weights     linear layers that are not quantized
    lambda            lambda_proj of diff_v2; the numbers of diff_v1 are constants of the graph
    norms
    biases
    rotary tables     cos and sin of every position
    padding           codes without a weight, and gaps between weights that align weights to pages
    graph             model.onnx
    tokenizer
    configuration     JSON that loaders read

They sum to the size of the manifest's files exactly. `weights` counts numbers, so that the bits per weight can be
checked: 8 * bytes / weights is 2 for ternary codes, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from ..quantize import Plan, sizes
from ..quantize.scheme import EMBEDDING_MODULE, HEAD_MODULE
from ..runtime.artifact import Part
from .onnx_graph import DATA, MODEL, TRANSFORMERS_JS_DATA

NAMED = {  # by the end of an initializer's name
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "lambda_proj.weight": "lambda",
    "norm.weight": "norms",
    "cos": "rotary tables",
    "sin": "rotary tables",
    "scale": "scales",
    "absmax": "scales",
    "offset": "scales",
    "zero": "scales",
    "weight": "float weights",
    "bias": "biases",
}
TABLES = {EMBEDDING_MODULE: "embedding ", HEAD_MODULE: "head "}
FILES = {"tokenizer": "tokenizer", "special_tokens": "tokenizer", "chat_template": "tokenizer"}


def parts(folder: Path, files: Iterable[str], plan: Plan) -> list[Part]:
    """Return the parts of the named files of an artifact's folder, largest first."""
    tensors = {tensor.module: tensor for tensor in sizes(plan).tensors}
    sums: dict[str, tuple[int, int]] = {}

    def add(part: str, nbytes: int, count: int = 0) -> None:
        before = sums.get(part, (0, 0))
        sums[part] = before[0] + nbytes, before[1] + count

    for name in files:
        size = (folder / name).stat().st_size
        if Path(name).name.startswith((DATA, TRANSFORMERS_JS_DATA)):
            add("padding", size)  # the weights in it are subtracted below
        elif Path(name).name == MODEL:
            graph = folder / name
            add("graph", size)
        else:
            add(next((part for start, part in FILES.items() if name.startswith(start)), "configuration"), size)
    for name, value in ir.load(graph).graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        if name.endswith(".codes"):
            scope, _, names = name.removesuffix(".codes").rpartition(".")
            modules = [f"{scope}.{last}" if scope else last for last in names.split("+")]  # DecoderGraph.linears
            stacked = [tensors.get(module) or tensors[f"model.{module}"] for module in modules]
            format, count = stacked[0].format, sum(tensor.weights for tensor in stacked)
            assert format is not None
            part, nbytes = f"{TABLES.get(stacked[0].module, '')}{format} codes", -(-count * format.device_bits // 8)
        else:
            part, count, nbytes = NAMED[next(filter(name.endswith, NAMED))], tensor.size, tensor.nbytes
        if part.startswith("embedding") and len(value.consumers()) > 1:
            part = part.replace("embedding", "embedding, head")
        add(part, nbytes, count)
        add("padding", -nbytes)
    rows = [Part(name=name, bytes=nbytes, weights=count or None) for name, (nbytes, count) in sums.items()]
    return sorted(rows, key=lambda part: -part.bytes)
