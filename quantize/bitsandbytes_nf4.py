"""Reading the 4-bit checkpoints that transformers writes with bitsandbytes (load_in_4bit, nf4).

A weight [N, K] lies as `<name>` uint8 [N*K/2, 1], high nibble first, beside `<name>.absmax`, `.quant_map` and
`.quant_state.bitsandbytes__nf4` (JSON as bytes: shape, dtype, block size); with double quantization absmax is 8-bit
itself, with `.nested_absmax` and `.nested_quant_map`. bitsandbytes' own QuantState reads all that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DiffbitError, MissingDependency
from ..models import Checkpoint
from ..models.checkpoint.names import reorder
from .formats import QTensor
from .formats.codebook import FORMAT, NF4
from .scheme import KEPT, Scheme, linear_shapes


def scheme(checkpoint: Checkpoint) -> Scheme:
    """What is nf4 in the checkpoint and what is not, as a scheme."""
    overrides = []
    names = set(checkpoint.names)
    for module, shape in linear_shapes(checkpoint.config).items():
        name = f"{module}.weight"
        packed = name in names and checkpoint.shape(name) != shape
        if packed == (module.rpartition(".")[2] in KEPT):  # otherwise than by default
            overrides.append((module, FORMAT if packed else None))
    return Scheme(weights=FORMAT, overrides=tuple(overrides))


def read(checkpoint: Checkpoint, name: str) -> QTensor:
    """The weight `name` in canonical row order; its scales are absmax as bitsandbytes computes it."""
    try:
        from bitsandbytes.functional import QuantState, dequantize_blockwise
    except ModuleNotFoundError:
        raise MissingDependency("bitsandbytes", "lab", f"reading the nf4 weights of {checkpoint.path}") from None

    shape = linear_shapes(checkpoint.config)[name.removesuffix(".weight")]
    where = f"{checkpoint.path}: tensor {name}"
    parts = {
        part.removeprefix(f"{name}."): checkpoint.read_raw(part)
        for part in checkpoint.names
        if part.startswith(f"{name}.")
    }
    try:
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
    except Exception as error:  # it asserts, parses JSON and looks up names: any of them fails on a damaged file
        raise DiffbitError(f"{where}: bitsandbytes cannot read its quantization state ({error})") from None
    if state.quant_type != "nf4" or state.blocksize != 64 or not torch.equal(state.code, torch.tensor(NF4)):
        raise DiffbitError(
            f"{where}: is {state.quant_type} in blocks of {state.blocksize}, wanted nf4 in blocks of 64; quantize the "
            "float checkpoint with diffbit instead"
        )
    if state.shape is None or tuple(state.shape) != shape:
        raise DiffbitError(f"{where}: has shape {state.shape}, wanted {shape} from config.json")
    try:
        FORMAT.check(shape)  # bitsandbytes lets a block go on into the next row
    except DiffbitError as error:
        raise DiffbitError(f"{where}: {error}") from None
    absmax: Tensor = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
    rows, columns = shape
    packed = checkpoint.read_raw(name).view(torch.uint8).reshape(-1)
    if packed.numel() * 2 != rows * columns or absmax.numel() * 64 != rows * columns:
        raise DiffbitError(f"{where}: its {packed.numel()} bytes and {absmax.numel()} scales do not fit {shape}")
    order = checkpoint.row_order(name)
    scale = absmax.float().view(rows, columns // 64)
    packed = packed.view(rows, columns // 2)
    return QTensor.from_packed(FORMAT, shape, reorder(packed, order), reorder(scale, order))
