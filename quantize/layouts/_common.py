"""Helpers that layouts share: their scheme, packed words, scales, and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from ...formats import GROUP_SIZES, Format, pack_bits, row_bytes, unpack_bits
from ...io.errors import DiffbitError
from ...io.fields import get, one_of
from ...models import Checkpoint, ModelConfig
from ..scheme import Scheme, linear_shapes

GroupSize = Annotated[
    int, one_of(-1, *GROUP_SIZES, words=f"one of {', '.join(map(str, GROUP_SIZES))}, or -1 (one scale per row)")
]
SMALL_HALF = 2.0**-14  # fp16 holds smaller numbers to within 2^-25


def scheme_of(checkpoint: Checkpoint, formats: Mapping[str, Format | None], activations: str | None = None) -> Scheme:
    """Return the scheme that gives these linear layers these formats, whose most common one becomes `weights`."""
    counts = Counter(format for format in formats.values() if format is not None)
    common = counts.most_common(1)[0][0] if counts else None
    default = Scheme(weights=common, activations=activations)
    usual = default.chosen(checkpoint.config)
    overrides = tuple((module, format) for module, format in formats.items() if format != usual.get(module))
    return replace(default, overrides=overrides)


def scheme_of_packed(checkpoint: Checkpoint, format: Format) -> Scheme:
    """Return the scheme by which the linear layers that have a `qweight` have this format."""
    names = set(checkpoint.names)
    return scheme_of(
        checkpoint, {name: format if f"{name}.qweight" in names else None for name in linear_shapes(checkpoint.config)}
    )


def about(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.path / 'config.json'}: quantization_config"


def shape_of(checkpoint: Checkpoint, module: str) -> tuple[int, int]:
    return linear_shapes(checkpoint.config)[module]


def setting(checkpoint: Checkpoint, name: str, kind: Any, default: Any = MISSING) -> Any:
    """Read a field of the quantization_config; ignores fields that diffbit does not know."""
    return get(checkpoint.quantization or {}, name, kind, default, about(checkpoint), extra=True)


def part(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None, *shapes: tuple[int, ...]) -> Tensor:
    """Read a tensor. Raises DiffbitError unless it has this dtype (None: any float) and one of these shapes."""
    if name not in checkpoint.names:
        raise DiffbitError(f"{checkpoint.path}: tensor {name} is missing from the weights")
    tensor = checkpoint.read_raw(name)
    right = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not right or tuple(tensor.shape) not in shapes:
        numbers = "floats" if dtype is None else _label(dtype)
        raise DiffbitError(
            f"{checkpoint.path}: tensor {name} is {_label(tensor.dtype)} {tuple(tensor.shape)}, wanted {numbers} "
            f"{' or '.join(map(str, shapes))}; config and weights do not belong together"
        )
    return tensor


def words(count: int, bits: int) -> int:
    """Return how many int32 words hold a row of `count` codes."""
    return -(-count * bits // 32)


def unpack_words(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Convert int32 [N, words] to codes uint8 [N, columns]: a little-endian bit stream in each row (packing.py)."""
    return unpack_bits(packed.contiguous().view(torch.uint8), bits, columns)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Invert `unpack_words`; bits past a row's end are 0."""
    rows, columns = codes.shape
    stream = codes.new_zeros(rows, 4 * words(columns, bits))
    stream[:, : row_bytes(columns, bits)] = pack_bits(codes, bits)
    return stream.view(torch.int32)


def half(scale: Tensor, where: str) -> Tensor:
    """Return scales as fp32 with values that fp16 can represent, because integer formats store fp16 scales.

    bfloat16 values below fp16's normal range are rounded, by at most 2^-25. Raises DiffbitError for other values that
    fp16 cannot represent.
    """
    wide = scale.float()
    rounded = wide.half().float()
    if ((rounded != wide) & ((scale.dtype == torch.float32) | (wide.abs() >= SMALL_HALF))).any():
        raise DiffbitError(
            f"{where}: has {_label(scale.dtype)} scales that float16 cannot represent, but diffbit stores scales of "
            "integers in float16; quantize the float checkpoint with diffbit instead"
        )
    return rounded


def one_format(config: ModelConfig, scheme: Scheme, method: str) -> tuple[Format, list[str]]:
    """Return the single format of a scheme that is written as `method`, and the linear layers that stay float."""
    formats = weights_only(config, scheme, method)
    if len(set(formats.values())) > 1:
        names = ", ".join(sorted({format.name for format in formats.values()}))
        raise DiffbitError(
            f"its weights are {names}, but a {method} folder holds one format; quantize without overrides"
        )
    return next(iter(formats.values())), [module for module in linear_shapes(config) if module not in formats]


def weights_only(config: ModelConfig, scheme: Scheme, method: str) -> Mapping[str, Format]:
    """Return {linear layer: format} of a scheme that quantizes the decoder's linear layers and nothing else."""
    formats = scheme.formats(config)
    if not formats:
        raise DiffbitError("its weights are float; quantize it first, such as with `diffbit quantize --weights int8`")
    if scheme.attention.is_low_bit or scheme.attention.states:
        raise DiffbitError(
            f"its attention is quantized, which a {method} folder cannot hold; quantize only the weights"
        )
    if any(module.rpartition(".")[2] in ("embed_tokens", "lm_head") for module in formats):
        raise DiffbitError(
            f"its head or embedding is quantized, which diffbit does not write to a {method} folder; quantize with "
            "--embedding none --head none"
        )
    return formats


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
