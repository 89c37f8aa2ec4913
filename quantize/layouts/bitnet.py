"""Hugging Face's `bitnet` checkpoints, such as microsoft/bitnet-b1.58-2B-4T (arXiv 2504.12285): ternary layers.

config.json's "quantization_config" has quant_method "bitnet" and determines the layout of the weights (transformers'
integrations/bitnet.py):

    linear_class     quantization_mode   <linear>.weight               scale s of the weight s * {-1, 0, 1}
    "bitlinear"      any                 uint8 [N/4, K]                1 / <linear>.weight_scale    (the default)
    "autobitlinear"  "offline"           uint8 [N/4, K], or the        <linear>.weight_scale
                                         numbers -1, 0, 1 [N, K]
    "autobitlinear"  "online"            float [N, K]                  max(mean|W|, 1e-5)

In packed weights, bits 2i and 2i+1 of row r hold W[r + i*N/4] + 1. Online weights are the float weights for further
training. transformers rounds them at every call; diffbit rounds them once, with the same arithmetic, when it reads
them. Inputs are rounded to int8 per token, as in any ternary layer. modules_to_not_convert lists the linear layers that
stay float; by default only the head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from ...formats import Format, QTensor, pack_bits, parse_format, unpack_bits
from ...io.errors import DiffbitError
from ...io.fields import Rule, one_of
from ...models import Checkpoint, ModelConfig, attention_options
from ..scheme import HEAD_MODULE, Scheme, linear_shapes
from . import Layout
from ._common import about, scheme_of, setting, shape_of, weights_only

METHOD = "bitnet"
FORMAT, SOFTMAX = parse_format("ternary"), attention_options("softmax")
PARTS = ("weight_scale", "rms_norm.weight")  # `_settings` raises an error for use_rms_norm
PER_BYTE = 4
CLASSES, MODES = ("bitlinear", "autobitlinear"), ("offline", "online")
# a module's name, perhaps with .* in it; limits the time to match it
Pattern = Annotated[str, Rule("a module's name", re.compile(r"[\w.]+(\*[\w.]+){0,2}\*?").fullmatch)]


def scheme(checkpoint: Checkpoint) -> Scheme:
    """Return the scheme of the checkpoint: its ternary and its float layers."""
    _settings(checkpoint)
    names = set(checkpoint.names)
    formats: dict[str, Format | None] = {}
    for module, shape in linear_shapes(checkpoint.config).items():
        name = f"{module}.weight"
        converted = name in names and _converts(checkpoint, module)
        if not converted and name in names and checkpoint.shape(name) != shape:
            raise DiffbitError(
                f"{checkpoint.path}: tensor {name} is packed, but config.json lists it in modules_to_not_convert; "
                "config and weights do not belong together"
            )
        formats[module] = FORMAT if converted else None
    return scheme_of(checkpoint, formats)


def read(checkpoint: Checkpoint, module: str, format: Format) -> QTensor:
    linear_class, mode = _settings(checkpoint)
    shape, name = shape_of(checkpoint, module), f"{module}.weight"
    where = f"{checkpoint.path}: tensor {name}"
    weight = checkpoint.read_raw(name)
    if (linear_class, mode) == ("autobitlinear", "online"):
        if not weight.is_floating_point():
            raise DiffbitError(f"{where}: is packed, but config.json says quantization_mode 'online': wanted floats")
        codes, scale = online(weight)
    else:
        codes = _codes(weight, shape, where)
        scale = _scale(checkpoint, f"{name}_scale")
        if linear_class == "bitlinear":
            scale = 1 / scale
    return QTensor(FORMAT, shape, codes, scale.view(1, 1))


def settings(config: ModelConfig, scheme: Scheme) -> dict[str, Any]:
    """Return the settings of microsoft/bitnet-b1.58-2B-4T. diffbit does not write "bitlinear", which stores the
    reciprocal of the scale: in float32 the reciprocal of that is not always the scale."""
    mixers = [layer.mixer for layer in config.layers]
    if not all(isinstance(mixer, SOFTMAX) for mixer in mixers):
        raise _refused(f"its attention is {config.attention}", "transformers' BitNet model has softmax attention")
    if scheme.activations == "int4":
        raise _refused("its activations are int4", "wanted a model trained with --activations int8")
    formats = weights_only(config, scheme, METHOD)
    for module, format in formats.items():
        if format != FORMAT:
            raise _refused(f"{module} is {format}", "wanted ternary or float layers")
        if linear_shapes(config)[module][0] % PER_BYTE:
            raise _refused(f"{module} has {linear_shapes(config)[module][0]} rows", f"wanted a multiple of {PER_BYTE}")
    width = next(mixer.num_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, SOFTMAX))
    if config.sub_norms and width != config.hidden_size:
        raise _refused(
            f"the width of its heads together is {width}, and that of its hidden states {config.hidden_size}",
            "transformers' BitNet model needs equal widths",
        )
    entry = {"quant_method": METHOD, "linear_class": "autobitlinear", "quantization_mode": "offline"}
    floats = (module for module in linear_shapes(config) if module not in formats and module != HEAD_MODULE)
    float_modules = [HEAD_MODULE, *floats]
    return entry | ({"modules_to_not_convert": float_modules} if len(float_modules) > 1 else {})


def pack_parts(weight: QTensor, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"weight": pack(weight.codes), "weight_scale": weight.scale.view(1)}


def online(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a float weight like transformers' WeightQuant -> (uint8 codes [N, K], scale fp32)."""
    weight = weight.float()
    inverse = 1.0 / weight.abs().mean().clamp(min=1e-5)
    return (weight * inverse).round().clamp(-1, 1).add(1).to(torch.uint8), 1 / inverse


def pack(codes: Tensor) -> Tensor:
    """Pack uint8 codes 0, 1, 2 [N, K] to uint8 [N/4, K]."""
    quarters = codes.unflatten(0, (PER_BYTE, -1))  # [4, N/4, K]
    return pack_bits(quarters.flatten(1).T.contiguous(), 2).view(quarters.shape[1:])


def unpack(packed: Tensor) -> Tensor:
    """Invert `pack`."""
    quarters = unpack_bits(packed.view(-1, 1), 2, PER_BYTE).T  # [4, N/4 * K]
    return quarters.reshape(PER_BYTE * packed.shape[0], packed.shape[1])


def _codes(weight: Tensor, shape: tuple[int, int], where: str) -> Tensor:
    if weight.is_floating_point():
        codes = weight.float() + 1
        if not ((codes == 0) | (codes == 1) | (codes == 2)).all():
            raise DiffbitError(
                f"{where}: has floats other than -1, 0 and 1, wanted packed weights; if they are weights for further "
                'training, config.json needs "linear_class": "autobitlinear", "quantization_mode": "online"'
            )
        return codes.to(torch.uint8)
    rows, columns = shape
    if rows % PER_BYTE:
        raise DiffbitError(f"{where}: its {rows} rows cannot be packed, wanted a multiple of {PER_BYTE}")
    if weight.dtype != torch.uint8 or weight.shape != (rows // PER_BYTE, columns):
        raise DiffbitError(
            f"{where}: is {str(weight.dtype).removeprefix('torch.')} {tuple(weight.shape)}, wanted uint8 "
            f"{(rows // PER_BYTE, columns)}, four rows per byte, or floats {shape}"
        )
    codes = unpack(weight)
    if (codes == 3).any():
        raise DiffbitError(f"{where}: holds a code of 3, wanted 0, 1 or 2; the file is damaged")
    return codes


def _scale(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read the weight_scale of a linear layer, fp32."""
    if name not in checkpoint.names:
        raise DiffbitError(
            f"{checkpoint.path}: tensor {name} is missing; packed layers need it, float layers must be listed in "
            "modules_to_not_convert in config.json"
        )
    scale = checkpoint.read_raw(name)
    if not scale.is_floating_point() or scale.numel() != 1 or not scale.item() > 0:
        raise DiffbitError(
            f"{checkpoint.path}: tensor {name} is {scale.flatten()[:4].tolist()} of shape {tuple(scale.shape)}, wanted "
            "one positive number"
        )
    return scale.float()


def _refused(problem: str, condition: str) -> DiffbitError:
    return DiffbitError(f"{problem}, which a bitnet folder cannot hold; {condition}")


def _settings(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return (linear_class, quantization_mode). Raises DiffbitError for settings that diffbit does not support."""
    if setting(checkpoint, "use_rms_norm", bool, False):
        raise DiffbitError(
            f"{about(checkpoint)} has use_rms_norm, a norm before each linear layer, which diffbit's models do not have"
        )
    linear_class = setting(checkpoint, "linear_class", Annotated[str, one_of(*CLASSES)], CLASSES[0])
    return linear_class, setting(checkpoint, "quantization_mode", Annotated[str, one_of(*MODES)], MODES[0])


def _converts(checkpoint: Checkpoint, module: str) -> bool:
    """Whether transformers replaces this module with a ternary layer (should_convert_module)."""
    patterns = setting(checkpoint, "modules_to_not_convert", tuple[Pattern, ...], (HEAD_MODULE,))
    return not any(
        re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(pattern) for pattern in patterns
    )


LAYOUT = Layout(METHOD, PARTS, scheme, read, settings, pack_parts)
