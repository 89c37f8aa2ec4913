"""What the int8 and int4 KV cache of ONNX Runtime's own GroupQueryAttention loses: KL from the float cache in a
published model, beside diffbit's own formats.

    python research/cache/fixed_scales.py SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --windows 4

Its scales are fixed before a text is known: one for a tensor, or one for a channel of a head. They, and an offset that
is subtracted from each channel, come from windows of the text `mix`. A row of the table says whether rows are rotated,
what the offset is (the mean of a channel, or its number in the first token of a window), and whether the scale is that
of the largest number or of the least square error. export/fixed_scales.py is what diffbit exports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from format import ROWS as OWN
from format import attention, measure, options, read, report
from torch import Tensor

from diffbit.export.fixed_scales import calibration_ids
from diffbit.models import Checkpoint
from diffbit.ops import kv_cache

CLIPS = torch.linspace(0.1, 1, 37).tolist()


@dataclass(frozen=True)
class Fixed:
    """keys, values: bits; 16: float. offset: "mean" of a channel, its number in the "first" token, or nothing ("").
    least_squares: whether the scale is that of the least square error; else of the largest number."""

    name: str
    keys: int = 8
    values: int = 8
    per_channel: bool = True
    rotated: bool = True
    offset: str = "first"
    least_squares: bool = False


EXPORTED = Fixed("int8 a channel, rotated, offset of the first token")
INT4 = replace(EXPORTED, keys=4, values=4, name="int4 a channel, rotated, offset of the first token")
ROWS = (
    EXPORTED,
    replace(EXPORTED, name="int8 a channel, rotated, offset of the mean", offset="mean"),
    replace(EXPORTED, name="int8 a channel, rotated", offset=""),
    replace(EXPORTED, name="int8 a channel, offset of the first token", rotated=False),
    replace(EXPORTED, name="int8 a channel", rotated=False, offset=""),
    replace(EXPORTED, name="int8 a tensor, rotated", per_channel=False, offset=""),
    replace(EXPORTED, name="int8 a tensor", per_channel=False, rotated=False, offset=""),
    replace(INT4, name="int4 a channel, rotated", offset=""),
    INT4,
    replace(INT4, name="int4 a channel, rotated, offset of the first token, least squares", least_squares=True),
)


def fitted(rows: Tensor, bits: int, format: Fixed) -> tuple[Tensor, Tensor]:
    """Return offset and scale of the keys or values of a text, [n, H, T, d]: both [H, 1, d], the scale of a tensor as
    often."""
    top = 2 ** (bits - 1) - 1
    rows = kv_cache.rotate(rows) if format.rotated else rows
    firsts, mean = rows[:, :, :1].median(0).values, rows.mean((0, 2))[:, None]
    offset = {"first": firsts, "mean": mean, "": torch.zeros_like(mean)}[format.offset]
    rest = (rows - offset).transpose(0, 1).flatten(1, 2)  # [H, n * T, d]
    dims = (1,) if format.per_channel else (0, 1, 2)
    largest = rest.abs().amax(dims, keepdim=True)
    scale = largest / top
    if format.least_squares:
        least = torch.full_like(scale, torch.inf)
        for clip in CLIPS:
            step = largest * clip / top
            error = ((rest / step).round().clamp(-top - 1, top) * step - rest).square().sum(dims, keepdim=True)
            scale, least = torch.where(error < least, step, scale), torch.minimum(error, least)
    return offset, scale.expand_as(offset)


def rounded(rows: Tensor, bits: int, format: Fixed, offset: Tensor, scale: Tensor) -> Tensor:
    """Return rows [B, H, T, d] as the cache holds them."""
    top = 2 ** (bits - 1) - 1
    rows = kv_cache.rotate(rows) if format.rotated else rows
    rows = ((rows - offset) / scale).round().clamp(-top - 1, top) * scale + offset
    return kv_cache.rotate(rows) if format.rotated else rows


def fixed_attention(format: Fixed, text: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Return an attention function of Transformers over such a cache. text: keys and values of each layer."""
    bits = format.keys, format.values
    fits = {
        layer: [fitted(rows, of, format) for rows, of in zip(pair, bits, strict=True)] for layer, pair in text.items()
    }

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
        fit = fits[module.layer_idx]
        key, value = (rounded(rows, of, format, *one) for rows, of, one in zip((key, value), bits, fit, strict=True))
        return attention(None)(module, query, key, value, *others, **options)

    return attend


def keys_and_values(model: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the keys, after RoPE, and the values of windows [n, T], each [n, H, T, d], of each layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
        found.setdefault(module.layer_idx, []).append((key, value))
        return attention(None)(module, query, key, value, *others, **options)

    ALL_ATTENTION_FUNCTIONS.register("study", attend)
    model.config._attn_implementation = "study"
    with torch.no_grad():
        for window in ids:
            model(window[None])
    return {
        layer: (torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs])) for layer, pairs in found.items()
    }


def main() -> None:
    arguments, model, windows = read(options(__doc__))
    checkpoint = Checkpoint(arguments.model)
    ids = calibration_ids(checkpoint.config, checkpoint.tokenizer_files["tokenizer.json"], checkpoint.path)
    text = keys_and_values(model, ids[:1] if arguments.quick else ids)

    def attention_of(format: Any) -> Callable[..., Any]:
        return fixed_attention(format, text) if isinstance(format, Fixed) else attention(format)

    own = [row for row in OWN if row.name.startswith(("int8", "as it is"))]
    rows = ROWS[:2] if arguments.quick else (*ROWS, *own)
    report(arguments, "fixed_scales", rows, measure(model, windows, rows, "windows", attention_of))


if __name__ == "__main__":
    main()
