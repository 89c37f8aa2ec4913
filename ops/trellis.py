"""Trellis codes of `diffbit.LowBitMatMul`: a weight's value depends on one bit of each of the seven weights before it.

A code c of `bits` bits, 2 to 6, is (u << (bits - 1)) | a. In each column, every 64 rows are a ring, in the order
p = 4 (row % 16) + row / 16 of the row within the 64: the rows of four tiles, lane by lane. The bits u of a weight and
of those before it are

    w_p = sum_{j=0..7} u_{(p - j) mod 64} << j          its window
    x_p = xor_{j: w_p >> j & 1} map[j]                  linear in the window
    i_p = a_p << s | x_p                                the index of a level; s = 4, 3, 3, 2, 3 for 2, 3, 4, 5, 6 bits
    v_p = m[i_p - H] if i_p >= H else -m[H - 1 - i_p]   for 2 to 5 bits; H is half the number of indices
    v_p = i_p - 128                                     for 6 bits: 256 levels equally far apart

So two neighbours never choose freely: a change of u changes the levels of eight weights. Of all such sequences an
encoder finds the nearest (Viterbi). Codes of this kind are those of trellis coded quantization (Marcellin & Fischer,
1990; QTIP, arXiv 2406.11235), whose trellis runs along a row and whose levels are computed or looked up in large
tables. Here it runs across rows, so a method that rounds columns in turn can round each at once.

The operator's input `levels` has, for such a weight, m, H numbers up to 127 (16 for 2 and 3 bits, 32 for 4 and 5, none
for 6), and then `map`, eight numbers below 2^s: in all 24, 40 or 8. Tables of symmetric levels are half as large, and a
lookup half as long.

Kernels look up three nibbles in place of a window: the four bits u of a lane, of the lane before it and of that before
(csrc/cpu/lowbit_matmul/vector.cpp). Those of a lane serve all of its tiles, and nothing is shifted.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from .signature import Type

if TYPE_CHECKING:
    import torch

    from .body import Nodes, Value

ROWS, LANES, TILES = 64, 16, 4  # of a ring
STATES = 128
MAP = 8  # numbers
SUBSET_BITS = {2: 4, 3: 3, 4: 3, 5: 2, 6: 3}  # s: more than these lessen the error of 2, 3 and 5 bits by 4 % at most
TABLE_BITS = 5  # up to which levels are those of a table


def index_bits(bits: int) -> int:
    return bits - 1 + SUBSET_BITS[bits]


def levels_size(bits: int) -> int:
    """Return the size of the operator's input `levels` for such a weight; 0 for bits of which there is none."""
    if bits not in SUBSET_BITS:
        return 0
    return MAP + (2 ** index_bits(bits) // 2 if bits <= TABLE_BITS else 0)


def levels_of(upper: tuple[float, ...]) -> tuple[float, ...]:
    """Return the values of all indices; upper: m, or () for levels equally far apart."""
    return (*(-m for m in reversed(upper)), *upper) if upper else tuple(range(-128, 128))


def map_of(masks: tuple[int, ...]) -> tuple[int, ...]:
    """Return `map` of the trellis in which bit b of x is the parity of w & masks[b]."""
    return tuple(sum((mask >> j & 1) << bit for bit, mask in enumerate(masks)) for j in range(MAP))


def subsets(map: torch.Tensor) -> torch.Tensor:
    """Return x uint8 [256] of each window."""
    import torch

    window = torch.arange(256, device=map.device)
    return reduce(lambda x, j: x ^ ((window >> j & 1) * map[j]), range(MAP), torch.zeros_like(window)).to(torch.uint8)


def ring(values: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [N / 64, 64, K], each ring in its order."""
    return values.unflatten(0, (-1, TILES, LANES)).transpose(1, 2).flatten(1, 2)


def unring(values: torch.Tensor) -> torch.Tensor:
    """Invert `ring`."""
    return values.unflatten(1, (LANES, TILES)).transpose(1, 2).flatten(0, 2)


def indices(codes: torch.Tensor, map: torch.Tensor, bits: int) -> torch.Tensor:
    """Return i uint8 [N, K] of codes uint8 [N, K], N a multiple of 64; map: uint8 [8]."""
    ordered = ring(codes)
    u = ordered >> (bits - 1)
    window = reduce(lambda sum, j: sum | u.roll(j, 1) << j, range(1, MAP), u).int()
    return unring((ordered & 2 ** (bits - 1) - 1) << SUBSET_BITS[bits] | subsets(map)[window])


def values(codes: torch.Tensor, levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Return v int16 [N, K] of codes uint8 [N, K]; levels: the operator's input."""
    return codes.short().new_tensor(levels_of(tuple(levels[:-MAP].tolist())))[
        indices(codes, levels[-MAP:], bits).long()
    ]


def input_levels(masks: tuple[int, ...], upper: tuple[float, ...]) -> list[int]:
    """Return the operator's input `levels`."""
    return [*map(int, upper), *map_of(masks)]


def body(op: Nodes, codes: Value, levels: Value, bits: int) -> Value:
    """Return v + 128 uint8 [N, G, group_size] of codes uint8 [N, G, group_size], N a multiple of 64."""

    def shift(x: Value, by: int, direction: str = "LEFT") -> Value:
        return op("BitShift", x, op.ints(by).cast(Type.UINT8), direction=direction)

    def rolled(x: Value, by: int) -> Value:
        return op("Concat", x.slice(ROWS - by, ROWS, 1), x.slice(0, ROWS - by, 1), axis=1)

    shape = op("Shape", codes)
    columns = codes.size(1) * codes.size(2)
    ordered = codes.reshape(-1, TILES, LANES, columns).transpose(0, 2, 1, 3).reshape(-1, ROWS, columns)
    window = shift(ordered, bits - 1, "RIGHT")
    for by in (1, 2, 4):
        window = op("BitwiseOr", window, shift(rolled(window, by), by))
    size = levels_size(bits)
    map = None  # x of each window
    for j in range(MAP):
        with_bit = levels.slice(size - MAP + j, size - MAP + j + 1, 0).cast(Type.INT32)
        with_bit = op.ints(*(w >> j & 1 for w in range(256))).cast(Type.INT32) * with_bit
        map = with_bit if map is None else op("BitwiseXor", map, with_bit)
    assert map is not None
    x = op("Gather", map.cast(Type.UINT8), window.cast(Type.INT32))
    a = op("BitwiseAnd", ordered, op.ints(2 ** (bits - 1) - 1).cast(Type.UINT8))
    index = op("BitwiseOr", shift(a, SUBSET_BITS[bits]), x)
    if bits > TABLE_BITS:
        found = index
    else:
        upper = levels.slice(0, size - MAP, 0).cast(Type.INT32)
        middle = op.ints(128).cast(Type.INT32)
        lower = upper.slice(-1, -(2**62), 0, -1)
        found = op(
            "Gather", op("Concat", middle - lower, middle + upper, axis=0).cast(Type.UINT8), index.cast(Type.INT32)
        )
    return found.reshape(-1, LANES, TILES, columns).transpose(0, 2, 1, 3).reshape(shape)


def codes_of(indices: torch.Tensor, masks: tuple[int, ...], bits: int) -> torch.Tensor:
    """Invert `indices`: codes uint8 [N, K] of indices that an encoder found.

    Some sum x' of bits of x is the parity of an odd number of bits of the window: u times a polynomial g in a delay D
    of one weight, modulo D^64 - 1 over GF(2). There g^64 = g(D^64) = 1, so u is x' times g^63.
    """
    chosen, polynomial = next(
        (subset, mask)
        for subset in range(1, 2 ** len(masks))
        if (mask := reduce(int.__xor__, (m for b, m in enumerate(masks) if subset >> b & 1), 0)).bit_count() % 2
    )
    inverse = reduce(_product, [polynomial] * 63, 1)
    ordered, s = ring(indices), SUBSET_BITS[bits]
    bits_of = [ordered >> b & 1 for b in range(s) if chosen >> b & 1]
    sums = reduce(lambda a, b: a ^ b, bits_of)
    u = reduce(lambda a, b: a ^ b, (sums.roll(j, 1) for j in range(ROWS) if inverse >> j & 1))
    return unring(u << (bits - 1) | ordered >> s)


def _product(a: int, b: int) -> int:
    """Multiply polynomials over GF(2) modulo D^64 - 1."""
    result = 0
    for j in range(ROWS):
        if b >> j & 1:
            result ^= a << j
    return result & 2**ROWS - 1 ^ result >> ROWS
