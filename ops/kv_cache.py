"""The low-bit KV cache: how keys and values are quantized, stored and read. In torch; the ONNX bodies and the kernels
compute the same codes and scales, bit for bit.

    format  keys and values                                                 bits a number (d = 64)
    int8    127 levels on either side of zero                               8.25
    int4    16 levels that suit a normal distribution                       4.25
    int3    8 such levels                                                   3.25
    int2    4 such levels                                                   2.25

Each row (a token of a head) has one scale, and is rotated by a Hadamard transform (ops/hadamard.py; the block is the
largest power of two that divides d): it spreads outlier channels over the row, whose numbers then are nearly normally
distributed (QuaRot, arXiv 2404.00456). Queries are rotated like keys, which leaves q . k as it is, and the output is
rotated back.

The int8 rows are symmetric: scale = float16(max|x| / 127), code = round-half-to-even(x / scale) in -127 .. 127,
x = code * scale.

A rotated row of the other formats is rounded to float16. Three kinds of tokens then stay float16, because they carry
most of the error:

    the first `first` tokens        attention sinks (arXiv 2309.17453)
    the residual window             of T tokens only the first `quantized_tokens(T, window)`, a multiple of 32, are
                                    low-bit, so at least `window` recent ones are not
    the offset of the keys          one row: the mean of tokens 16 to 31. It is subtracted from every key before that is
                                    rounded, and q . offset is added to its score. Keys have large channels that
                                    hardly change from token to token (KIVI, arXiv 2402.02750)

A row y (keys: less the offset) is first rounded to 8 bits. What follows is arithmetic of integers below 2^24, exact in
float32, so it does not depend on the order of sums:

    n = int8 codes of y, with scale s        E = sum n^2        z = n * sqrt(d / max(E, 1))
    code = how many of THRESHOLDS z exceeds  level = LEVELS[code]
    scale = float16(s * (sum n level / sum level^2))     the scale of least squares
    y = level * scale

A row with an infinite or NaN number has scale NaN, and so has an int8 row that needs a scale beyond float16. A query
sees the cache as it was when its own token was the last, so the result does not depend on how the prompt was split into
calls.

With a sliding window of n tokens, a query sees only the last n, and the rows are a ring of fixed size: token t is in
row t mod `ring_rows`, whole blocks of 32 tokens together. The residual window is unchanged; there are no first tokens.

Codes of a row are packed in groups of 32 channels, 4 * bits bytes each, as planes (`PLANES`; int3: of 2 bits and of 1
bit), the low bits first: in a plane of p bits, byte i holds the channels i, i + 4 p, i + 8 p, ... of its group, the
first in its lowest bits, so that a vector of bytes unpacks into neighbouring channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 32  # tokens that leave the residual window together
OFFSET_TOKENS = range(16, 32)  # whose mean is the offset of the keys
MAX_FIRST = 16
# Bits of a cache's numbers; float: those of the model's floats
BITS = {"float": 16, "fp16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
PLANES = {4: (4,), 3: (2, 1), 2: (2,)}
# The quantizer of least mean square error for a normal distribution (Max, 1960): levels in units of the largest / 127
_POSITIVE_LEVELS = {4: (6, 18, 31, 44, 58, 75, 96, 127), 3: (14, 45, 79, 127), 2: (38, 127)}
_POSITIVE_THRESHOLDS = {
    4: (0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
    3: (0.5006, 1.05, 1.748),
    2: (0.9816,),
}
LEVELS = {bits: (*(-level for level in reversed(levels)), *levels) for bits, levels in _POSITIVE_LEVELS.items()}
THRESHOLDS = {bits: (*(-x for x in reversed(xs)), 0.0, *xs) for bits, xs in _POSITIVE_THRESHOLDS.items()}


def quantized_tokens(total: int, window: int) -> int:
    """Return how many of `total` tokens, the first, are low-bit: whole blocks, so that at least `window` are not."""
    return max(0, total - window) // BLOCK * BLOCK


def ring_rows(sliding_window: int, bits: int) -> int:
    """Return the rows of a sliding window's cache: one per token; below 8 bits, whole blocks."""
    return -(-sliding_window // BLOCK) * BLOCK if bits < 8 else sliding_window


def quantize_rows(x: Tensor, bits: int = 8, half: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., d] to codes int8 [..., d] and scales float32 [...]; symmetric, absmax. half: the scales are
    rounded to float16 first.

    A row of zeros has scale 0 and codes 0; a row with an infinity or a NaN has scale NaN and codes 0.
    """
    import torch

    top = 2 ** (bits - 1) - 1
    x = x.float()
    scale = x.abs().amax(-1) / top
    scale = scale.half().float() if half else scale
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    codes = torch.round(x / torch.where(scale == 0, 1, scale)[..., None]).clamp(-top, top).nan_to_num()
    return codes.to(torch.int8), scale


def rotate(x: Tensor) -> Tensor:
    """Rotate rows [..., d] of a low-bit cache by a Hadamard transform, in x's precision; it is its own inverse.

    The sums are those of ops/hadamard.py, in the same order; a block is the largest power of two that divides d.
    """
    import torch

    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    distance = 1
    while distance < size:
        low, high = blocks.unflatten(-1, (-1, 2, distance)).unbind(-2)
        blocks = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    return blocks.flatten(-2) * (1 / math.sqrt(size))


def offset_of(rows: Tensor) -> Tensor:
    """Return the offset float16 [..., d] of keys float16 [..., T, d], T >= 32: the mean of tokens 16 to 31, halves
    added to halves in float32."""
    total = rows[..., OFFSET_TOKENS.start : OFFSET_TOKENS.stop, :].float()
    while total.shape[-2] > 1:
        low, high = total.chunk(2, -2)
        total = low + high
    return (total[..., 0, :] / len(OFFSET_TOKENS)).half()


def encode_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize rows float32 [..., d], rotated and less their offset, to scales float16 [...] and codes [..., d]: int8,
    or uint8 of 4, 3 or 2 bits."""
    import torch

    if bits == 8:
        codes, scale = quantize_rows(x, half=True)
        return codes, scale.half()
    codes, unit = quantize_rows(x)
    n = codes.float()
    energy = n.square().sum(-1, keepdim=True).clamp(min=1)
    z = n * (torch.full_like(energy, x.shape[-1]) / energy).sqrt()  # a number / a tensor is a product in torch
    codes = torch.bucketize(z, torch.tensor(THRESHOLDS[bits], device=x.device)).to(torch.uint8)  # of z > threshold
    levels = levels_of(codes, bits)
    return codes, (unit * ((n * levels).sum(-1) / levels.square().sum(-1))).half()


def levels_of(codes: Tensor, bits: int) -> Tensor:
    """Return the levels of codes uint8, in float32; those of int8 codes are the codes themselves."""
    import torch

    return codes.float() if bits == 8 else torch.tensor(LEVELS[bits], device=codes.device).float()[codes.int()]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [..., d] of `bits` bits into bytes [..., d * bits / 8]."""
    import torch

    planes, shift = [], 0
    for width in PLANES[bits]:
        planes.append(pack_plane(codes >> shift & (1 << width) - 1, width, 4 * width).unflatten(-1, (-1, 4 * width)))
        shift += width
    return torch.cat(planes, -1).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack`."""
    groups = packed.unflatten(-1, (-1, 4 * bits)).split([4 * width for width in PLANES[bits]], -1)
    low, *high = (
        unpack_plane(plane.flatten(-2), width, 4 * width) for plane, width in zip(groups, PLANES[bits], strict=True)
    )
    return low | high[0] << PLANES[bits][0] if high else low


def pack_plane(codes: Tensor, bits: int, width: int) -> Tensor:
    """Pack codes uint8 [..., d] of 1, 2 or 4 bits into bytes [..., d * bits / 8]: in groups of `width` bytes, byte i
    has the codes i, i + width, i + 2 width, ..."""
    import torch

    parts = codes.unflatten(-1, (-1, 8 // bits, width))  # [..., group, place in a byte, byte]
    packed = torch.zeros_like(parts[..., 0, :])
    for place in range(8 // bits):
        packed |= parts[..., place, :] << (place * bits)
    return packed.flatten(-2)


def unpack_plane(packed: Tensor, bits: int, width: int) -> Tensor:
    """Invert `pack_plane`."""
    import torch

    groups = packed.unflatten(-1, (-1, 1, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return ((groups >> shifts) & (2**bits - 1)).flatten(-3)


def row_scores(query: Tensor, levels: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return dot products [..., S, T] of rounded queries: query [..., S, d], levels [..., T, d], scale [..., T].

    (codes of the query . levels of the key) * query's scale * key's scale

    In float32, or in float64 if the query is; its codes are always computed in float32.
    """
    dtype = _precision(query)
    rounded, query_scale = quantize_rows(query, bits)
    dots = rounded.to(dtype) @ levels.to(dtype).transpose(-1, -2)  # below 2^24: exact in float32
    return dots * query_scale[..., None] * scale.to(dtype)[..., None, :]


def _precision(query: Tensor) -> torch.dtype:
    import torch

    return torch.float64 if query.dtype == torch.float64 else torch.float32
