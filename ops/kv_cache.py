"""The low-bit KV cache: how keys and values are quantized, stored and read. In torch; the ONNX bodies and the kernels
compute the same codes and scales, bit for bit.

    format  keys and values                                             bits a number (d = 64)
    int8    a row (token) has a scale                                   8.5
    int4    a channel of 32 tokens is a block with a scale and a zero   5
            point
    int2    the same                                                    3

The int8 rows are symmetric: scale = max|x| / 127, code = round-half-to-even(x / scale), x = code * scale (float32).

int4 and int2 keys follow KIVI (arXiv 2402.02750): they have outlier channels, which a scale per channel keeps apart.
KIVI rounds values in blocks of 32 channels of a token; in blocks like the keys' they lose less (research/attention). A
block of 32 float16 numbers x has a scale and a zero point, both float16:

    zero = min x      scale = float16((max x - min x) / (2^bits - 1))      code = clip(round((x - zero) / scale))
    x = code * scale + zero                                                 codes are 0 where the scale is 0

computed in float32; if one of the numbers is infinite or NaN, scale and zero are NaN and the codes 0. A block needs 32
tokens, so the most recent tokens, the residual window, stay in float16: of T tokens the first
`quantized_tokens(T, window)`, a multiple of 32, are low-bit, and at least `window` are not. A query sees the cache as
it was when its own token was the last, so the result does not depend on how the prompt was split into calls.

With a sliding window of n tokens, a query sees only the last n, and the rows are a ring of fixed size: token t is in
row t mod `ring_rows`, whole blocks of 32 tokens together. The residual window is unchanged.

Codes of a row are packed in groups of 32 channels, 4 * bits bytes each: byte i holds the channels i, i + 4 bits,
i + 8 bits, ... of its group, the first in its lowest bits, so that a vector of bytes unpacks into neighbouring
channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 32  # tokens of a channel that share a scale
# Bits of a cache's numbers; float: those of the model's floats
BITS = {"float": 16, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}


def quantized_tokens(total: int, window: int) -> int:
    """Return how many of `total` tokens, the first, are low-bit: whole blocks, so that at least `window` are not."""
    return max(0, total - window) // BLOCK * BLOCK


def ring_rows(sliding_window: int, bits: int) -> int:
    """Return the rows of a sliding window's cache: one per token; with 4 and 2 bits, whole blocks."""
    return -(-sliding_window // BLOCK) * BLOCK if bits < 8 else sliding_window


def quantize_rows(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., d] to codes int8 [..., d] and scales float32 [...]; symmetric, absmax.

    A row of zeros has scale 0 and codes 0; a row with an infinity or a NaN has scale NaN and codes 0.
    """
    import torch

    top = 2 ** (bits - 1) - 1
    x = x.float()
    scale = x.abs().amax(-1) / top
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    codes = torch.round(x / torch.where(scale == 0, 1, scale)[..., None]).clamp(-top, top).nan_to_num()
    return codes.to(torch.int8), scale


def quantize_blocks(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize [..., T, d] in blocks of 32 tokens of a channel to codes uint8 [..., T, d], and scales and zero points
    float16 [..., T / 32, 2, d]."""
    import torch

    x = x.half().float().unflatten(-2, (-1, BLOCK))  # [..., n, 32, d]
    top = 2**bits - 1
    zero = x.amin(-2, keepdim=True)
    scale = ((x.amax(-2, keepdim=True) - zero) / top).half().float()
    scale, zero = (torch.where(scale.isfinite(), part, torch.nan) for part in (scale, zero))
    codes = torch.round((x - zero) / torch.where(scale == 0, 1, scale)).clamp(0, top).nan_to_num()
    return codes.to(torch.uint8).flatten(-3, -2), torch.cat((scale, zero), -2).half()


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Invert `quantize_blocks`; returns float32 [..., T, d]."""
    factor, zero = scale.float().split(1, -2)  # [..., n, 1, d]
    return (codes.float().unflatten(-2, (-1, BLOCK)) * factor + zero).flatten(-3, -2)


def pack(codes: Tensor, bits: int, width: int = 0) -> Tensor:
    """Pack codes uint8 [..., d] into bytes [..., d * bits / 8]; width: bytes per group (0: 4 * bits)."""
    import torch

    parts = codes.unflatten(-1, (-1, 8 // bits, width or 4 * bits))  # [..., group, place in a byte, byte]
    packed = torch.zeros_like(parts[..., 0, :])
    for place in range(8 // bits):
        packed |= parts[..., place, :] << (place * bits)
    return packed.flatten(-2)


def unpack(packed: Tensor, bits: int, width: int = 0) -> Tensor:
    """Invert `pack`."""
    import torch

    groups = packed.unflatten(-1, (-1, 1, width or 4 * bits))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return ((groups >> shifts) & (2**bits - 1)).flatten(-3)


def row_scores(query: Tensor, codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return dot products [..., S, T] with int8 keys: query [..., S, d], scaled, codes [..., T, d], scale [..., T].

    (codes of the query . codes of the key) * query's scale * key's scale

    In float32, or in float64 if the query is; its codes are always computed in float32. The same holds for
    `block_scores`.
    """
    dtype = _precision(query)
    rounded, query_scale = quantize_rows(query, bits)
    dots = rounded.to(dtype) @ codes.to(dtype).transpose(-1, -2)  # below 2^24: exact in float32
    return dots * query_scale[..., None] * scale[..., None, :]


def block_scores(query: Tensor, codes: Tensor, scale: Tensor, bits: int, key_bits: int) -> Tensor:
    """Return dot products [..., S, 32 n] with keys in blocks: query [..., S, d], codes [..., 32 n, d].

    A key is code * scale + zero, channel by channel, so the scales of a block are folded into the query:

        u = query * scale      (codes of u . codes of the key) * u's scale + query . zero + mid * lost

    A key's codes are centred on the middle of their range, mid = (2^key bits - 1) / 2, so the effect of rounding u is
    mainly mid times the sum of its errors. It is corrected by one number per query and block: lost = sum(u - codes of
    u * u's scale).
    """
    dtype = _precision(query)
    factors, zeros = scale.float().unbind(-2)  # [..., n, d]
    scaled = query.float().unsqueeze(-3) * factors.unsqueeze(-2)  # [..., n, S, d]
    rounded, scaled_scale = quantize_rows(scaled, bits)
    rounded = rounded.to(dtype)
    dots = rounded @ codes.to(dtype).unflatten(-2, (-1, BLOCK)).transpose(-1, -2)  # [..., n, S, 32]
    lost = (scaled.to(dtype) - rounded * scaled_scale[..., None]).sum(-1)
    offsets = zeros.to(dtype) @ query.to(dtype).transpose(-1, -2) + lost * ((2**key_bits - 1) / 2)  # [..., n, S]
    return (dots * scaled_scale[..., None] + offsets[..., None]).movedim(-3, -2).flatten(-2)


def _precision(query: Tensor) -> torch.dtype:
    import torch

    return torch.float64 if query.dtype == torch.float64 else torch.float32
