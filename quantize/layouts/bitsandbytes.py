"""bitsandbytes' 4-bit layout, nf4 and fp4: transformers writes it (load_in_4bit), vLLM and peft read it.

A weight [N, K] is stored as `<linear>.weight` uint8 [N*K/2, 1], high nibble first, with `<linear>.weight.absmax`,
`.quant_map` and `.quant_state.bitsandbytes__nf4` (JSON as bytes: shape, dtype, block size). The same bytes may be
stored as another dtype (bnb_4bit_quant_storage; FSDP needs that of the float parameters), such as bfloat16 [N*K/4, 1].
With double quantization absmax itself has 8 bits, with `.nested_absmax` and `.nested_quant_map`. bitsandbytes' own
QuantState reads these. diffbit writes absmax in float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from ...formats import TABLES, CodebookFormat, Format, QTensor, finite, parse_format
from ...io.errors import DiffbitError, needs
from ...io.fields import located, one_of
from ...models import Checkpoint, ModelConfig
from ..scheme import Scheme, linear_shapes
from . import Layout
from ._common import one_format, scheme_of, setting, shape_of

METHOD = "bitsandbytes"
PARTS = ("weight.",)
BLOCK = 64


def scheme(checkpoint: Checkpoint) -> Scheme:
    if setting(checkpoint, "load_in_8bit", bool, False):
        raise DiffbitError(
            f"{checkpoint.path / 'config.json'}: the weights are bitsandbytes' int8, but diffbit reads only its nf4 "
            "and fp4; start from the float checkpoint, such as with `diffbit quantize --weights int8`"
        )
    kind = setting(checkpoint, "bnb_4bit_quant_type", Annotated[str, one_of(*TABLES)], "nf4")
    format, names = parse_format(kind), set(checkpoint.names)

    packed = {name.removesuffix(".weight.absmax") for name in names if name.endswith(".weight.absmax")}
    return scheme_of(
        checkpoint, {name: format if name in packed else None for name in linear_shapes(checkpoint.config)}
    )


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    """Read a weight; its scales are absmax as bitsandbytes computes it."""
    with needs("bitsandbytes", "lab", f"reading the {format} weights of {checkpoint.path}"):
        from bitsandbytes.functional import QuantState

    shape, name = shape_of(checkpoint, module), f"{module}.weight"
    where = f"{checkpoint.path}: tensor {name}"
    parts = {
        part.removeprefix(f"{name}."): checkpoint.read_raw(part)
        for part in checkpoint.names
        if part.startswith(f"{name}.")
    }
    try:
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        absmax: Tensor = state.absmax if not state.nested else _dequantized(state)
    except Exception as error:  # on a damaged file its assertions, JSON parser or look-ups may fail
        raise DiffbitError(f"{where}: bitsandbytes cannot read its quantization state ({error})") from None
    table = torch.tensor(TABLES[format.name])
    if state.quant_type != format.name or state.blocksize != BLOCK or not torch.equal(state.code, table):
        raise DiffbitError(
            f"{where}: is {state.quant_type} in blocks of {state.blocksize}, wanted {format} in blocks of {BLOCK}; "
            "quantize the float checkpoint with diffbit instead"
        )
    if state.shape is None or tuple(state.shape) != shape:
        raise DiffbitError(f"{where}: has shape {state.shape}, wanted {shape} from config.json")
    with located(where):
        format.check(shape)  # in bitsandbytes a block may continue in the next row
    rows, columns = shape
    packed = checkpoint.read_bytes(name)
    if packed.numel() * 2 != rows * columns or absmax.numel() * BLOCK != rows * columns:
        raise DiffbitError(f"{where}: its {packed.numel()} bytes and {absmax.numel()} scales do not fit {shape}")
    scale = absmax.float().view(rows, columns // BLOCK)
    return QTensor.from_packed(format, shape, packed.view(rows, columns // 2), scale)


def _dequantized(state: Any) -> Tensor:
    """Return the absmax of double quantization, without dequantize_blockwise, which reads past the ends of tables that
    are too short."""
    if state.absmax.dtype != torch.uint8:
        raise ValueError(f"absmax is {state.absmax.dtype}, wanted uint8")
    inner, blocks = state.state2, torch.arange(state.absmax.numel()) // state.state2.blocksize
    return finite(inner.code[state.absmax.flatten().long()] * inner.absmax.flatten()[blocks] + state.offset)


def settings(config: ModelConfig, scheme: Scheme) -> dict[str, Any]:
    format, floats = one_format(config, scheme, METHOD)
    if not isinstance(format, CodebookFormat):
        raise DiffbitError(f"its weights are {format}, wanted {' or '.join(TABLES)} for a bitsandbytes folder")
    if scheme.activations is not None:
        raise DiffbitError("its activations are quantized, which a bitsandbytes folder cannot hold")
    return {
        "quant_method": METHOD,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": format.name,
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": floats,
    }


def pack(weight: QTensor, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    name = weight.format.name
    state = {"quant_type": name, "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    return {
        "weight": weight.packed().view(-1, 1),
        "weight.absmax": weight.scale.flatten(),
        "weight.quant_map": torch.tensor(TABLES[name]),
        f"weight.quant_state.bitsandbytes__{name}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


LAYOUT = Layout(METHOD, PARTS, scheme, read, settings, pack)
