"""Layouts of quantized weights in a checkpoint folder: one file for each `quant_method` of config.json.

    diffbit              <linear>.codes, .scale, .zero             diffbit's own
    gptq                 <linear>.qweight, .qzeros, .scales        GPTQModel, AutoGPTQ: 2, 3, 4 and 8 bits
    awq                  the same, packed along out_features       AutoAWQ: 4 bits, "gemm" and "gemv"
    compressed-tensors   <linear>.weight_packed, .weight_scale     llm-compressor, vLLM: integers of 2 to 8 bits
    bitsandbytes         <linear>.weight, .weight.absmax, ...      nf4 and fp4
    bitnet               <linear>.weight, .weight_scale            ternary

Codes, zero points and scales are converted to one of diffbit's formats (formats/) without rounding again. Every file in
this folder is a layout, except _common.py. A layout has METHOD (its quant_method), PARTS (suffixes of the names of a
linear layer's tensors; a suffix that ends with a dot is a prefix of several) and

    scheme(checkpoint) -> Scheme                   the format of each weight
    read(checkpoint, module, format) -> QTensor    in the row order on disk

Layouts that diffbit also writes (export/checkpoint.py) have

    settings(config, scheme) -> dict               the quantization_config; raises DiffbitError if it cannot hold that
    parts(weight, settings) -> {suffix: tensor}    in the row order on disk
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated

from torch import Tensor

from ...formats import QTensor
from ...io.errors import DiffbitError
from ...io.fields import one_of
from ...models import Checkpoint
from ...models.checkpoint.names import EMBEDDING, is_linear, linear_of, shapes
from ..scheme import Scheme
from ._common import setting
from .diffbit import parse_entry

__all__ = ["LAYOUTS", "WRITTEN", "parse_entry", "read_scheme", "read_weight"]

_FILES = [import_module(f".{entry.name}", __name__) for entry in iter_modules(__path__)]
LAYOUTS: dict[str, ModuleType] = {module.METHOD: module for module in _FILES if hasattr(module, "METHOD")}
WRITTEN = tuple(name for name, module in LAYOUTS.items() if hasattr(module, "settings"))


def layout_of(checkpoint: Checkpoint) -> ModuleType | None:
    """The layout of a quantized folder; None for a float one. Raises DiffbitError for an unknown quant_method."""
    entry = checkpoint.quantization
    if entry is None:
        return None
    name = "quantizer" if "quantizer" in entry and "quant_method" not in entry else "quant_method"
    return LAYOUTS[setting(checkpoint, name, Annotated[str, one_of(*LAYOUTS)])]


def read_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """The scheme of a quantized checkpoint; None for a float one. Raises DiffbitError for unexpected tensors."""
    layout = layout_of(checkpoint)
    if layout is None:
        return None
    known = shapes(checkpoint.config)
    scheme: Scheme = layout.scheme(checkpoint)
    for name in checkpoint.names:
        if name not in known and not _is_part(name, layout):
            raise DiffbitError(
                f"{checkpoint.path}: holds tensor {name}, which a folder of quant_method {layout.METHOD} does not "
                "have; config and weights do not belong together"
            )
    return scheme


def read_weight(checkpoint: Checkpoint, name: str, scheme: Scheme | None) -> Tensor | QTensor:
    """Read a parameter by its float name, in canonical row order: a Tensor in its stored dtype, or a QTensor."""
    module = name.removesuffix(".weight")
    format = scheme.format_for(module) if scheme and (is_linear(name) or name == EMBEDDING) else None
    if format is None:
        shape = shapes(checkpoint.config).get(name)
        if name not in checkpoint.names or not checkpoint.is_float(name) or checkpoint.shape(name) != shape:
            raise DiffbitError(
                f"{checkpoint.path}: config.json says that {name} is float, but the weights do not have it so; config "
                "and weights do not belong together"
            )
        return checkpoint.read(name)
    layout = layout_of(checkpoint)
    assert layout is not None
    _check_no_bias(checkpoint, f"{module}.bias")
    try:
        weight: QTensor = layout.read(checkpoint, module, format)
    except DiffbitError as error:
        if str(error).startswith(str(checkpoint.path)):
            raise
        raise DiffbitError(f"{checkpoint.path}: {module}: {error}") from None
    order = checkpoint.row_order(name)
    return weight if order is None else weight.rows(order)


def _is_part(name: str, layout: ModuleType) -> bool:
    part = name.removeprefix(f"{linear_of(name)}.")
    whole, begun = [[known for known in layout.PARTS if (known[-1] == ".") == prefix] for prefix in (False, True)]
    return part in ("bias", *whole) or part.startswith(tuple(begun))


def _check_no_bias(checkpoint: Checkpoint, name: str) -> None:
    """Raise DiffbitError for a bias that the model does not have, except zeros, which AutoGPTQ wrote there."""
    if name in checkpoint.names and name not in shapes(checkpoint.config) and checkpoint.read_raw(name).any():
        raise DiffbitError(
            f"{checkpoint.path}: tensor {name} is a bias, which a {checkpoint.config.attention} model of its "
            "config.json does not have; config and weights do not belong together"
        )
