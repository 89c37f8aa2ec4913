"""Packing against Python's own big integers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.formats.packing import pack_bits, row_bytes, swap_pairs, unpack_bits


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 67), st.randoms(use_true_random=False))
def test_a_row_is_a_little_endian_bit_stream(bits, rows, columns, random):
    codes = [[random.randrange(2**bits) for _ in range(columns)] for _ in range(rows)]
    packed = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.shape == (rows, row_bytes(columns, bits))
    for row, stream in zip(codes, packed, strict=True):
        number = sum(code << bits * place for place, code in enumerate(row))
        assert bytes(stream.tolist()) == number.to_bytes(row_bytes(columns, bits), "little")
    assert unpack_bits(packed, bits, columns).tolist() == codes


def test_known_bytes():
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    assert pack_bits(codes, 4).tolist() == [[0x21, 0xF3]]  # low nibble first
    assert pack_bits(swap_pairs(codes), 4).tolist() == [[0x12, 0x3F]]  # high nibble first
    assert pack_bits(torch.tensor([[1, 2, 3, 0, 3]], dtype=torch.uint8), 2).tolist() == [[0b00_11_10_01, 0b11]]
    assert pack_bits(torch.tensor([[5, 6, 7]], dtype=torch.uint8), 3).tolist() == [[0b11_110_101, 0b1]]
