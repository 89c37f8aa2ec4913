"""LowBitMatMul: the reference against a loop with the C library's fma, body and kernels against that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.ops import int4_matmul, lowbit_matmul

from ..native import cuda
from .cases import LOWBIT_CASES, LOWBIT_KINDS, LowBitCase
from .cuda_run import TYPES, Device, on_devices_in_turn
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node
from .test_int4_matmul import fma, rounded_groups

cases = pytest.mark.parametrize("case", LOWBIT_CASES, ids=lambda case: case.name)
CONSTANTS = ("codes", "scales", "row_scales", "levels", "factor")


def weights(case: LowBitCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """v int64 [N, K], d float32 [N, G] and r float32 [N] by the docstring."""
    codes, scale, row_scale, levels = (None if x is None else x.numpy() for x in case.weight())
    if case.trellis:
        v = trellis_values(codes, levels, case.bits)
    else:
        v = codes.astype(np.int64) - 2 ** (case.bits - 1) if levels is None else levels[codes].astype(np.int64) - 128
    row = np.ones(case.n, np.float32) if row_scale is None else row_scale[:, 0].astype(np.float32)
    return v, scale.astype(np.float32), row


def trellis_values(codes: np.ndarray, levels: np.ndarray, bits: int) -> np.ndarray:
    """v int64 [N, K] by the docstring of ops/trellis.py, one weight at a time."""
    half, s = {2: 16, 3: 16, 4: 32, 5: 32, 6: 128}[bits], {2: 4, 3: 3, 4: 3, 5: 2, 6: 3}[bits]
    table, upper = levels[-8:].astype(int), levels[:-8].astype(int)
    v = np.empty(codes.shape, np.int64)
    for n, k in np.ndindex(codes.shape):
        ring, row = divmod(n, 64)
        place = 4 * (row % 16) + row // 16
        x = 0
        for j in range(8):
            p = (place - j) % 64
            if int(codes[64 * ring + p % 4 * 16 + p // 4, k]) >> (bits - 1):
                x ^= table[j]
        index = (int(codes[n, k]) % 2 ** (bits - 1)) << s | x
        v[n, k] = index - 128 if bits == 6 else upper[index - half] if index >= half else -upper[half - 1 - index]
    return v


def by_the_book(case: LowBitCase) -> np.ndarray:
    """One output and one group at a time, as the docstring has it."""
    a, *_, factor = (None if x is None else x.numpy() for x in case.inputs())
    v, scale, row_scale = weights(case)
    rows = a.astype(np.float32).reshape(-1, case.k)
    out = np.empty((len(rows), case.n), np.float32)
    for i, row in enumerate(rows):
        groups = rounded_groups(row, case.group)
        for n in range(case.n):
            total = np.float32(0)
            for g, (q, step) in enumerate(groups):
                exact = int(q @ v[n, g * case.group : (g + 1) * case.group])
                total = np.float32(fma(exact, scale[n, g] * step, total))
            out[i, n] = total * (row_scale[n] * factor[0])
    return out.reshape(*case.lead, case.n).astype(a.dtype)


def node(case: LowBitCase) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
    a, *_, factor = case.inputs()
    tensors = {"A": a, **case.packed()._asdict(), "factor": factor}
    return {name: tensor.numpy() for name, tensor in tensors.items()}, case.attributes()


def reference(case: LowBitCase) -> np.ndarray:
    a, *_, factor = case.inputs()
    return lowbit_matmul.reference(a, case.packed(), factor, case.n, case.group).numpy()


@cases
def test_reference_is_exact(case: LowBitCase) -> None:
    got = reference(case)
    expected = by_the_book(case)
    assert got.dtype == expected.dtype and np.array_equal(got, expected, equal_nan=True)
    assert np.isnan(expected).any() == (case.fill == "wild")


@pytest.mark.parametrize("case", [case for case in LOWBIT_CASES if case.fill != "wild"], ids=lambda case: case.name)
def test_body_is_the_reference(case: LowBitCase) -> None:
    inputs, attributes = node(case)
    body = body_of(lowbit_matmul.function, case.bits, case.table, case.trellis)
    (got,) = run_node(body, inputs, attributes, {"Y": inputs["A"].ndim}, constants=CONSTANTS)
    expected = reference(case)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    # in float16 the scales are multiplied together, and rounded again
    # MatMulNBits subtracts 128 times the sum of the activations in float32, which is large beside small levels
    largest = 2**case.bits - 1 if case.doubled else 128
    tolerance = 1e-6 * 128 / largest if case.dtype == torch.float32 else 1e-3
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * (np.abs(expected.astype(np.float64)).max() or 1))


def run(case: LowBitCase, isa: str, threads: int = 1) -> np.ndarray:
    inputs, attributes = node(case)
    body = body_of(lowbit_matmul.function, case.bits, case.table, case.trellis)
    (got,) = run_node(body, inputs, attributes, {"Y": inputs["A"].ndim}, CONSTANTS, isa, threads)
    return got


@on_isas_in_turn(LOWBIT_CASES)
def test_kernel_is_exact(case: LowBitCase, isa: str) -> None:
    got, expected = run(case, isa), reference(case)
    assert got.dtype == expected.dtype and np.array_equal(got, expected, equal_nan=True)


CUDA_CASES = [
    *LOWBIT_CASES,
    LowBitCase("bf16", (9,), 1100, 61, 64, factor=0.7, dtype=torch.bfloat16, bits=5),
    LowBitCase("long_levels", (11,), 2100, 61, 32, bits=3, table=True),
]


@on_devices_in_turn(CUDA_CASES)
def test_cuda_kernel_is_exact(case: LowBitCase, device: Device) -> None:
    a, *_, factor = case.inputs()
    packed = case.packed()
    inputs = [device.put(x) for x in (a, *packed, factor)]
    y = device.poisoned((*case.lead, case.n), a.dtype)
    pointers = [x.data_ptr() for x in (*inputs, y)]
    if not case.int8_scales:
        pointers[3] = 0
    if not case.table:
        pointers[4] = 0
    sizes = [a.numel() // case.k, case.n, case.k, case.group, case.bits, 3 if case.int8_scales else cuda.FLOAT16]
    sizes.append(int(case.trellis))
    device.run(cuda.LowBitMatMul(*pointers, *sizes, TYPES[a.dtype]))
    expected = lowbit_matmul.reference(a, packed, factor, case.n, case.group)
    assert torch.allclose(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@on_each_isa
def test_threads_do_not_change_the_result(isa: str) -> None:
    for bits, rows in ((3, 1), (6, 4), (5, 65)):
        case = LowBitCase("threads", (rows,), 1024, 1100, seed=rows, bits=bits)
        one, two, four = (run(case, isa, threads) for threads in (1, 2, 4))
        assert np.array_equal(one, two) and np.array_equal(one, four)


@on_each_isa
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 300),
    n=st.integers(1, 150),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    kind=st.sampled_from(LOWBIT_KINDS),
    int8_scales=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_exact(
    isa: str,
    rows: int,
    columns: int,
    n: int,
    group: int,
    kind: tuple[int, bool],
    int8_scales: bool,
    half: bool,
    seed: int,
) -> None:
    dtype = torch.float16 if half else torch.float32
    bits, table = kind
    case = LowBitCase(
        "any", (rows,), columns, n, group, True, 0.3, "normal", dtype, seed, bits, False, table, int8_scales
    )
    assert np.array_equal(run(case, isa), reference(case))


def test_layout_is_the_documented_one() -> None:
    for bits, planes in ((2, [2, 2]), (3, [2, 2, 1]), (4, [4] * 4), (5, [4] * 4 + [1]), (6, [4] * 4 + [2, 2])):
        codes = torch.zeros(17, 70, dtype=torch.uint8)
        codes[3, 43] = 2**bits - 1  # tile 0, group 0 of 64, run 1, quad 3 (step 1, odd), row 3, byte 1
        packed = lowbit_matmul.pack(codes, torch.ones(17, 2), None, None, 64, bits).codes
        assert packed.shape == (2, 2, 2, bits, 16, 4)
        run = packed[0, 0, 1]
        (at,) = {tuple(place[1:]) for place in run.nonzero().tolist()}
        assert at == (3, 1) and packed[0].count_nonzero() > 0
        number, width_before = 0, 0
        for width in dict.fromkeys(planes):
            fields = [run[width_before + plane, 3, 1].item() for plane in range(planes.count(width))]
            place = 3 * width  # of quad 3 in all the fields' bits
            assert fields[place // 8] == (2**width - 1) << place % 8 and sum(map(bool, fields)) == 1
            number, width_before = number | (2**width - 1) << width_before, width_before + width
        assert number == 2**bits - 1


def test_four_bits_are_the_bytes_of_int4_matmul() -> None:
    case = LowBitCase("four", k=201, n=37, group=64, int8_scales=False)
    codes, scale, _, _ = case.weight()
    ours, theirs = case.packed().codes, int4_matmul.pack(codes, scale, None, 64).codes
    assert torch.equal(ours.flatten(2), theirs.flatten(2))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    bits=st.integers(2, 6),
    int8_scales=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_unpack_undoes_pack(rows: int, columns: int, group: int, bits: int, int8_scales: bool, seed: int) -> None:
    case = LowBitCase("any", (1,), columns, rows, group, seed=seed, bits=bits, int8_scales=int8_scales)
    codes, scale, row_scale, _ = case.weight()
    expected = (
        codes,
        scale if int8_scales else scale.half(),
        torch.ones(rows, 1).half() if row_scale is None else row_scale,
    )
    for a, b in zip(lowbit_matmul.unpack(case.packed(), rows, columns), expected, strict=True):
        assert torch.equal(a, b)


def test_scales_must_be_float16_numbers() -> None:
    codes, tenth = torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[0.1]])
    for scale, row_scale in ((tenth, None), (torch.ones(1, 1, dtype=torch.int8), tenth)):
        with pytest.raises(ValueError, match="not representable in float16"):
            lowbit_matmul.pack(codes, scale, row_scale, None, 32, 4)
