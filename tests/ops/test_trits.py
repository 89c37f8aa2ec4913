"""ExpandTrits: packing against digits written out, the body against the bytes that were packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.ops import ternary_matmul, trits

from .onnx_run import run_node


def random_packed(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return ternary_matmul.pack(torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8))


def body(stored: torch.Tensor, rest: torch.Tensor, constants: tuple[str, ...] = ()) -> np.ndarray:
    inputs = {"trits": stored.numpy(), "rest": rest.numpy()}
    (packed,) = run_node(trits.function(), inputs, {"spec_version": trits.OP.version}, {"packed": 2}, constants)
    return packed


def test_layout_is_the_documented_one() -> None:
    packed = random_packed(3, 300)  # 96 bytes: five runs of 19, and one
    stored, rest = trits.pack(packed)
    assert stored.shape == (3, 4, 19) and rest.shape == (3, 1)
    fields = [[[int(byte) >> 2 * field & 3 for field in range(4)] for byte in row] for row in packed]
    for n in range(3):
        for run in range(4):
            for i in range(19):
                digits = [fields[n][76 + i][run], *fields[n][19 * run + i]]
                assert stored[n, run, i] == sum(digit * 3**place for place, digit in enumerate(digits))
        assert rest[n, 0] == packed[n, 95]


@pytest.mark.parametrize("order", [range(243), reversed(range(243))], ids=["rising", "falling"])
def test_every_value_in_every_run(order: range) -> None:
    values = torch.tensor(list(order), dtype=torch.uint8)
    stored = torch.stack([values.roll(shift) for shift in (0, 1, 80, 121)])[None]
    rest = torch.zeros(1, 0, dtype=torch.uint8)
    wanted = trits.reference(stored, rest)
    assert torch.equal(trits.pack(wanted)[0], stored)
    assert np.array_equal(body(stored, rest), wanted.numpy())
    assert np.array_equal(body(stored, rest, ("trits", "rest")), wanted.numpy())


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 1500), seed=st.integers(0, 2**31))
def test_any_shape_comes_back(rows: int, columns: int, seed: int) -> None:
    packed = random_packed(rows, columns, seed)
    stored, rest = trits.pack(packed)
    assert torch.equal(trits.reference(stored, rest), packed)
    assert np.array_equal(body(stored, rest), packed.numpy())
    if columns >= 1024:
        assert (stored.numel() + rest.numel()) * 8 <= 1.61 * 4 * packed.numel()


def test_sums_of_pairs_stay_within_int16() -> None:
    """AVX2 adds two products of a byte in 16 bits: none of these may saturate."""
    (first, _, _), (second, _, _) = trits._convolutions()
    for weight, largest in ((first, [242] * 4), (second, [242 // 3**k for _, k in trits._FLOORS])):
        for row in weight:
            products = sorted(number * most for number, most in zip(row, largest, strict=True))
            assert sum(products[:2]) >= -32768 and sum(products[-2:]) <= 32767
            assert all(-128 <= number <= 127 for number in row)
