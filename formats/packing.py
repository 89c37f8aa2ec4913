"""Packs small integers into bytes, row by row.

Rows never share a byte, so packed rows can be permuted, sliced and streamed.
"""

from __future__ import annotations

from math import gcd

import torch.nn.functional as F
from torch import Tensor


def row_bytes(columns: int, bits: int) -> int:
    """Return the bytes of a row of `columns` codes of `bits` bits each."""
    return -(-columns * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 [N, K], values < 2^bits, into uint8 [N, ceil(K*bits/8)]: one little-endian bit stream per row.

    Code k occupies bits k*bits ... k*bits + bits-1 of its row, where bit 0 is the lowest of the first byte: at 4 bits
    the low nibble comes first, at 2 bits the lowest pair, as in ONNX Runtime's MatMulNBits. Bits past the end are 0.
    """
    if bits == 8:
        return codes.clone()
    rows, columns = codes.shape
    group = 8 // gcd(8, bits)  # codes that fill whole bytes: 8 of 3 bits in 3 bytes, 2 of 4 bits in 1
    size = group * bits // 8
    codes = F.pad(codes, (0, -columns % group)).view(rows, -1, group)
    packed = codes.new_zeros(rows, codes.shape[1], size)
    for place in range(group):
        byte, shift = divmod(place * bits, 8)
        packed[..., byte] |= codes[..., place] << shift  # uint8 drops the bits shifted out at the top
        if shift + bits > 8:
            packed[..., byte + 1] |= codes[..., place] >> (8 - shift)
    return packed.view(rows, -1)[:, : row_bytes(columns, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Invert `pack_bits`: uint8 [N, ceil(columns*bits/8)] -> uint8 [N, columns]."""
    if bits == 8:
        return packed[:, :columns].clone()
    rows = packed.shape[0]
    group = 8 // gcd(8, bits)
    size = group * bits // 8
    packed = F.pad(packed, (0, -packed.shape[1] % size)).view(rows, -1, size)
    codes = packed.new_empty(rows, packed.shape[1], group)
    for place in range(group):
        byte, shift = divmod(place * bits, 8)
        code = packed[..., byte] >> shift
        if shift + bits > 8:
            code = code | packed[..., byte + 1] << (8 - shift)
        codes[..., place] = code & (2**bits - 1)
    return codes.view(rows, -1)[:, :columns].contiguous()


def swap_pairs(codes: Tensor) -> Tensor:
    """Swap columns 2i and 2i+1 of [N, K], K even. Packed at 4 bits, the HIGH nibble then comes first."""
    return codes.unflatten(1, (-1, 2)).flip(-1).flatten(1)
