"""What an artifact is made of: the bytes of its files by part, read from the files as they lie.

    ternary codes     2 bits a weight
    integer codes     of int2 to int8: the bits of the container that the operator reads (linear.py)
    codebook codes    nf4
    scales            and zero points
    embedding         a row of it is read for a token; "embedding, head" where the head is the same table
    head              a float one
    float weights     linear layers that are not quantized
    lambda            lambda_proj of diff_v2; the numbers of diff_v1 are constants of the graph
    norms
    rotary tables     cos and sin of every position
    padding           codes that stand for no weight, and gaps in model.onnx.data that put weights on page boundaries
    graph             model.onnx
    tokenizer
    configuration     JSON that loaders read

They add up to the files that the manifest lists, to the byte. `weights` counts numbers, so that a part's bits a weight
can be checked: 8 * bytes / weights is 2 for ternary codes, whatever was padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from .graph import DATA, MODEL

CODES = {  # by the operator that multiplies: the part, and bits of a code (None: the node says)
    "TernaryMatMul": ("ternary codes", 2),
    "Int4MatMul": ("integer codes", 4),
    "MatMulNBits": ("integer codes", None),
    "MatMulBnb4": ("codebook codes", 4),
    "MatMul": ("codebook codes", 4),
}
NAMED = {  # by the end of an initializer's name
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "lambda_proj.weight": "lambda",
    "norm.weight": "norms",
    "cos": "rotary tables",
    "sin": "rotary tables",
    "scale": "scales",
    "absmax": "scales",
    "zero": "scales",
    "weight": "float weights",
}
FILES = {"tokenizer": "tokenizer", "special_tokens": "tokenizer", "chat_template": "tokenizer"}


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    weights: int | None = None  # numbers in it; None where it holds no weights


def parts(folder: str | Path, files: Iterable[str]) -> list[Part]:
    """What the named files of an artifact's folder are made of, largest first."""
    folder = Path(folder)
    found: dict[str, tuple[int, int]] = {}

    def add(part: str, nbytes: int, weights: int = 0) -> None:
        before = found.get(part, (0, 0))
        found[part] = before[0] + nbytes, before[1] + weights

    for name in files:
        size = (folder / name).stat().st_size
        if name == DATA:
            add("padding", size)  # less what the graph says of it, below
        elif name == MODEL:
            add("graph", size)
        else:
            add(next((part for start, part in FILES.items() if name.startswith(start)), "configuration"), size)
    for name, value in ir.load(folder / MODEL).graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        if name.endswith("codes"):
            part, weights, nbytes = _codes(value, tensor)
        else:
            part, weights, nbytes = NAMED[next(filter(name.endswith, NAMED))], tensor.size, tensor.nbytes
            if part == "embedding" and len(value.consumers()) > 1:
                part = "embedding, head"
        add(part, nbytes, weights)
        add("padding", -nbytes)
    rows = [Part(name, nbytes, weights or None) for name, (nbytes, weights) in found.items()]
    return sorted(rows, key=lambda part: -part.bytes)


def _codes(value: ir.Value, tensor: ir.ExternalTensor) -> tuple[str, int, int]:
    """Part, weights, and the bytes that they take without padding."""
    node = value.consumers()[0]
    while node.op_type not in CODES:  # what unpacks codes at load stands between
        node = node.outputs[0].consumers()[0]
    part, bits = CODES[node.op_type]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    bits = bits or attributes["bits"]
    weights = attributes["K"] * attributes["N"] if "K" in attributes else tensor.nbytes * 8 // bits
    return part, weights, -(-weights * bits // 8)
