"""Numbers of a low-bit KV cache: how keys and values are rounded, laid out and read. Torch here; the ONNX bodies and
the kernels compute the same codes and scales, bit for bit.

    format  keys                                    values                               bits a number (d = 64)
    int8    a row (token) has one step              a row has one step                   8.5
    int4    a channel of 32 tokens has a grid       32 channels of a token have a grid   5
    int2    the same                                the same                             3

The int8 rows are symmetric: step = max|x| / 127, code = round-half-to-even(x / step), x = code * step (float32).

int4 and int2 follow KIVI (arXiv 2402.02750): keys have outlier channels, which a grid per channel keeps apart; values
have none. A grid over 32 float16 numbers x is a step and a point, both float16:

    point = min x      step = float16((max x - min x) / (2^bits - 1))      code = clip(round((x - point) / step))
    x = code * step + point                                                 codes are 0 where the step is 0

computed in float32; where one of the numbers is infinite or NaN, step and point are NaN and the codes 0. A key's grid
needs 32 tokens, so the most recent tokens stay as they came, rounded to float16: of T tokens the first
`settled(T, window)` are low-bit, a multiple of 32, and at least `window` are not. A query sees what the cache held when
its own token was the last: the same, however the prompt was cut.

Codes of a row are packed by groups of 32 channels, 4 * bits bytes each: byte i holds the channels i, i + 4 bits,
i + 8 bits, ... of its group, the first in its lowest bits, so that a vector of bytes unpacks into neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = 32  # tokens that share a key's grid, channels that share a value's
# Of a cache's codes; float: as wide as the model's floats
BITS = {"float": 16, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}


def settled(total: int, window: int) -> int:
    """How many of `total` tokens are low-bit: the first, in whole groups, so that at least `window` are not."""
    return max(0, total - window) // GROUP * GROUP


def round_rows(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """float [..., d] -> codes int8 [..., d] and steps float32 [...]; symmetric, absmax.

    A row of zeros has step 0 and codes 0, one with an infinity or a NaN the step NaN and codes 0.
    """
    import torch

    top = 2 ** (bits - 1) - 1
    x = x.float()
    step = x.abs().amax(-1) / top
    step = torch.where(step.isfinite(), step, torch.nan)
    codes = torch.round(x / torch.where(step == 0, 1, step)[..., None]).clamp(-top, top).nan_to_num()
    return codes.to(torch.int8), step


def round_grid(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """Numbers that share a grid along `dim` -> codes uint8, as x, and float16 [2, ...], `dim` 1: steps, points."""
    import torch

    x = x.half().float()
    top = 2**bits - 1
    point = x.amin(dim, keepdim=True)
    step = ((x.amax(dim, keepdim=True) - point) / top).half().float()
    step, point = (torch.where(step.isfinite(), part, torch.nan) for part in (step, point))
    codes = torch.round((x - point) / torch.where(step == 0, 1, step)).clamp(0, top).nan_to_num()
    return codes.to(torch.uint8), torch.stack((step, point)).half()


def round_keys(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys [..., 32 n, d] -> codes uint8, shaped as they are, and grids float16 [..., n, 2, d]."""
    codes, grid = round_grid(x.unflatten(-2, (-1, GROUP)), bits, dim=-2)
    return codes.flatten(-3, -2), grid.squeeze(-2).movedim(0, -2)


def round_values(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Values [..., T, d] -> codes uint8, shaped as they are, and grids float16 [..., T, 2, d / 32]."""
    codes, grid = round_grid(x.unflatten(-1, (-1, GROUP)), bits, dim=-1)
    return codes.flatten(-2), grid.squeeze(-1).movedim(0, -2)


def restore_keys(codes: Tensor, grids: Tensor) -> Tensor:
    """float32 [..., 32 n, d]: the inverse of `round_keys`."""
    step, point = grids.float().unsqueeze(-2).unbind(-3)  # [..., n, 1, d]
    return (codes.float().unflatten(-2, (-1, GROUP)) * step + point).flatten(-3, -2)


def restore_values(codes: Tensor, grids: Tensor) -> Tensor:
    """float32 [..., T, d]: the inverse of `round_values`."""
    step, point = grids.float().unsqueeze(-1).unbind(-3)  # [..., T, d / 32, 1]
    return (codes.float().unflatten(-1, (-1, GROUP)) * step + point).flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., d] -> bytes [..., d * bits / 8]; d a multiple of 32."""
    import torch

    parts = codes.unflatten(-1, (-1, 8 // bits, 4 * bits))  # [..., group, place in a byte, byte]
    packed = torch.zeros_like(parts[..., 0, :])
    for place in range(8 // bits):
        packed |= parts[..., place, :] << (place * bits)
    return packed.flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    import torch

    groups = packed.unflatten(-1, (-1, 1, 4 * bits))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return ((groups >> shifts) & (2**bits - 1)).flatten(-3)


def row_scores(query: Tensor, codes: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Integer dot products with int8 keys: query [..., S, d], scaled, and [..., T, d], [..., T] -> [..., S, T].

    (codes of the query . codes of the key) * query's step * key's step

    In float32, or in the query's float64; its codes are those of float32 in either case. So in `grid_scores`.
    """
    dtype = _precision(query)
    rounded, step = round_rows(query, bits)
    dots = rounded.to(dtype) @ codes.to(dtype).transpose(-1, -2)  # below 2^24: exact in float32
    return dots * step[..., None] * steps[..., None, :]


def grid_scores(query: Tensor, codes: Tensor, grids: Tensor, bits: int, key_bits: int) -> Tensor:
    """Integer dot products with keys on grids: query [..., S, d], codes [..., 32 n, d] -> [..., S, 32 n].

    A key is code * step + point, channel by channel, so the steps of a block go to the query's side:

        u = query * step      (codes of u . codes of the key) * u's step + query . point + mid * lost

    A key's codes lie around the middle of their grid, mid = (2^key bits - 1) / 2, so what u lost when it was rounded is
    mostly lost times mid. That comes back, as one number a query and block: lost = sum(u - codes of u * u's step).
    """
    dtype = _precision(query)
    steps, points = grids.float().unbind(-2)  # [..., n, d]
    stepped = query.float().unsqueeze(-3) * steps.unsqueeze(-2)  # [..., n, S, d]
    rounded, step = round_rows(stepped, bits)
    rounded = rounded.to(dtype)
    dots = rounded @ codes.to(dtype).unflatten(-2, (-1, GROUP)).transpose(-1, -2)  # [..., n, S, 32]
    lost = (stepped.to(dtype) - rounded * step[..., None]).sum(-1)
    offsets = points.to(dtype) @ query.to(dtype).transpose(-1, -2) + lost * ((2**key_bits - 1) / 2)  # [..., n, S]
    return (dots * step[..., None] + offsets[..., None]).movedim(-3, -2).flatten(-2)


def _precision(query: Tensor) -> torch.dtype:
    import torch

    return torch.float64 if query.dtype == torch.float64 else torch.float32
