"""Int4MatMul and Int8MatMul: the reference against a loop with the C library's fma, the kernels against that."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.ops import int4_matmul

from ..native import cuda
from .cases import INT4_CASES, INT8_CASES, Int4Case
from .cuda_run import TYPES, Device, on_devices_in_turn, on_each_device
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node

CPU_CASES = [*INT4_CASES, *INT8_CASES]
cases = pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
CONSTANTS = ("codes", "scales", "zeros", "factor")


fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fma.restype, fma.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def rounded_groups(row: np.ndarray, group: int) -> list[tuple[np.ndarray, np.float32]]:
    """q and a_g of every group of a row."""
    groups = []
    for start in range(0, len(row), group):
        x = row[start : start + group]
        largest = np.abs(x).max()
        if not np.isfinite(largest):
            groups.append((np.zeros(len(x), np.int64), np.float32(np.nan)))
        elif largest < np.float32(1e-30):
            groups.append((np.zeros(len(x), np.int64), np.float32(0)))
        else:
            q = np.round(x * (np.float32(127) / largest)).astype(np.int64)
            groups.append((q, largest / np.float32(127)))
    return groups


def by_the_book(case: Int4Case) -> np.ndarray:
    """One output and one group at a time, as the docstring has it."""
    a, codes, scale, zero, factor = (None if x is None else x.numpy() for x in case.inputs())
    rows = a.astype(np.float32).reshape(-1, case.k)
    out = np.empty((len(rows), case.n), np.float32)
    for i, row in enumerate(rows):
        groups = rounded_groups(row, case.group)
        for n in range(case.n):
            total = np.float32(0)
            for g, (q, step) in enumerate(groups):
                part = codes[n, g * case.group : (g + 1) * case.group].astype(np.int64)
                at = 0 if case.row_scale else g
                exact = int(q @ (part - (2 ** (case.bits - 1) if zero is None else int(zero[n, at]))))
                total = np.float32(fma(exact, scale[n, at] * step, total))
            out[i, n] = total * factor[0]
    return out.reshape(*case.lead, case.n).astype(a.dtype)


def node(case: Int4Case) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
    a, *_, factor = case.inputs()
    tensors = {"A": a, **case.packed()._asdict(), "factor": factor}
    return {name: tensor.numpy() for name, tensor in tensors.items()}, case.attributes()


def expected(case: Int4Case) -> torch.Tensor:
    a, *_, factor = case.inputs()
    return int4_matmul.reference(a, case.packed(), factor, case.n, case.group)


def reference(case: Int4Case) -> np.ndarray:
    return expected(case).numpy()


@cases
def test_reference_is_exact(case: Int4Case) -> None:
    got = reference(case)
    expected = by_the_book(case)
    assert got.dtype == expected.dtype and np.array_equal(got, expected, equal_nan=True)
    assert np.isnan(expected).any() == (case.fill == "wild")


@pytest.mark.parametrize("case", [case for case in CPU_CASES if case.fill != "wild"], ids=lambda case: case.name)
def test_body_is_the_reference(case: Int4Case) -> None:
    inputs, attributes = node(case)
    (got,) = run_node(body_of(case.op.function), inputs, attributes, {"Y": inputs["A"].ndim}, constants=CONSTANTS)
    expected = reference(case)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    # in float16 the factor goes into the scales, which are rounded again
    tolerance = 1e-6 if case.dtype == torch.float32 else 1e-3
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * (np.abs(expected.astype(np.float64)).max() or 1))


@on_isas_in_turn(CPU_CASES)
def test_kernel_is_exact(case: Int4Case, isa: str) -> None:
    inputs, attributes = node(case)
    (got,) = run_node(body_of(case.op.function), inputs, attributes, {"Y": inputs["A"].ndim}, CONSTANTS, isa)
    expected = reference(case)
    assert got.dtype == expected.dtype and np.array_equal(got, expected, equal_nan=True)


# Numbers of rows around a product's, every size of a group, odd numbers of groups and tiles, tiles of both sizes
CUDA_CASES = [
    *INT4_CASES,
    *INT8_CASES,
    Int4Case("int8_bf16", (9,), 1100, 61, 32, False, 0.7, dtype=torch.bfloat16, seed=60, bits=8),
    *(
        Int4Case(f"around_{m}_g{group}", (m,), 450, 61, group, group == 64, 0.7, dtype=torch.bfloat16, seed=60 + m)
        for m in (1, 7, 8, 16, 17, 33)
        for group in int4_matmul.GROUP_SIZES
    ),
    *(Int4Case(f"long_{m}", (m,), 2100, 100, symmetric=False, seed=70 + m) for m in (1, 2, 5, 11, 20)),
    Int4Case("more_rows_than_fit", lead=(8,), k=3000, n=100, group=128, seed=80),
    *(Int4Case(f"high_codes_{m}", (m,), 1024, 70, 128, False, fill="high") for m in (16, 20)),
    *(Int4Case(f"low_codes_{m}", (m,), 1024, 70, 128, fill="low") for m in (16, 20)),
    Int4Case("wild_prefill", lead=(20,), k=96, fill="wild", seed=81),
    Int4Case("wide_tiles", lead=(130,), k=200, n=700, dtype=torch.float16, seed=82),
    Int4Case("wide_tiles_g64", lead=(129,), k=500, n=641, group=64, symmetric=False, seed=83),
    Int4Case("wide_tiles_g128", lead=(131,), k=300, n=648, group=128, dtype=torch.bfloat16, seed=84),
]


def run_cuda_kernel(case: Int4Case, device: Device) -> torch.Tensor:
    a, *_, factor = case.inputs()
    packed = case.packed()
    inputs = [device.put(x) for x in (a, packed.codes, packed.scales, packed.zeros, factor)]
    y = device.poisoned((*case.lead, case.n), a.dtype)
    pointers = [x.data_ptr() for x in (*inputs, y)]
    if case.symmetric:
        pointers[3] = 0
    sizes = [a.numel() // case.k, case.n, case.k, case.group]
    if case.bits == 4:
        device.run(cuda.Int4MatMul(*pointers, *sizes, TYPES[a.dtype]))
    else:
        device.run(cuda.Int8MatMul(*pointers, *sizes, packed.scales.shape[1], TYPES[a.dtype]))
    return y.cpu()


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)


@on_devices_in_turn(CUDA_CASES)
def test_cuda_kernel_is_exact(case: Int4Case, device: Device) -> None:
    assert same(run_cuda_kernel(case, device), expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_cuda_kernel_with_more_shared_memory_is_exact(rows: int) -> None:
    case = Int4Case("large", lead=(rows,), k=3000, n=200, symmetric=False, seed=85)
    with mock.patch.dict(os.environ, {"DIFFBIT_EMULATE_SHARED": str(227 << 10)}):
        assert same(run_cuda_kernel(case, Device("cpu")), expected(case))


@on_each_device
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 700),
    n=st.integers(1, 150),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    symmetric=st.booleans(),
    dtype=st.sampled_from(list(TYPES)),
    seed=st.integers(0, 2**31),
)
def test_cuda_kernel_at_any_shape(
    device: Device, rows: int, columns: int, n: int, group: int, symmetric: bool, dtype: torch.dtype, seed: int
) -> None:
    case = Int4Case("any", (rows,), columns, n, group, symmetric, 0.3, dtype=dtype, seed=seed)
    assert same(run_cuda_kernel(case, device), expected(case))


@on_each_isa
def test_threads_change_nothing(isa: str) -> None:
    for lead, n in (((1,), 2000), ((3,), 515), ((70,), 333)):
        case = Int4Case("threads", lead=lead, k=512, n=n, symmetric=False)
        inputs, attributes = node(case)
        one, two, four = (
            run_node(body_of(case.op.function), inputs, attributes, {"Y": 2}, CONSTANTS, isa, threads)[0]
            for threads in (1, 2, 4)
        )
        assert np.array_equal(one, two) and np.array_equal(one, four)


@on_each_isa
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 300),
    n=st.integers(1, 150),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    symmetric=st.booleans(),
    half=st.booleans(),
    bits=st.sampled_from((4, 8)),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_exact(
    isa: str, rows: int, columns: int, n: int, group: int, symmetric: bool, half: bool, bits: int, seed: int
) -> None:
    dtype = torch.float16 if half else torch.float32
    case = Int4Case("any", (rows,), columns, n, group, symmetric, 0.3, dtype=dtype, seed=seed, bits=bits)
    inputs, attributes = node(case)
    (got,) = run_node(body_of(case.op.function), inputs, attributes, {"Y": 2}, CONSTANTS, isa)
    assert np.array_equal(got, reference(case))


def test_layout_is_the_documented_one() -> None:
    codes = torch.full((17, 70), 8, dtype=torch.uint8)
    codes[3, 10] = 1  # tile 0, group 0, step 1, row 3, byte 1, low
    codes[3, 11] = 2  # high
    codes[16, 69] = 3  # tile 1, group 1 of 64, step 0, row 0, byte 2, high
    packed = int4_matmul.pack(codes, torch.arange(34).view(17, 2) + 1.0, None, 64)
    assert packed.codes.shape == (2, 2, 8, 16, 4) and packed.scales.shape == (2, 2, 16)
    assert packed.codes[0, 0, 1, 3, 1] == 0x21 and packed.codes[1, 1, 0, 0, 2] == 0x38
    assert packed.codes[0].unique().tolist() == [0x21, 0x88]
    assert packed.scales[0, 1, 3] == 8 and packed.scales[1, 0, 0] == 33 and not packed.scales[1, :, 1:].any()
    assert packed.zeros.shape == (1, 1, 1) and packed.zeros.item() == 8


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    symmetric=st.booleans(),
    bits=st.sampled_from((4, 8)),
    seed=st.integers(0, 2**31),
)
def test_unpack_undoes_pack(rows: int, columns: int, group: int, symmetric: bool, bits: int, seed: int) -> None:
    case = Int4Case("any", (1,), columns, rows, group, symmetric, seed=seed, bits=bits)
    _, codes, scale, zero, _ = case.inputs()
    got = int4_matmul.unpack(case.packed(), rows, columns)
    wanted_zero = torch.full_like(scale, 2 ** (bits - 1), dtype=torch.uint8) if zero is None else zero
    for a, b in zip(got, (codes, scale.half(), wanted_zero), strict=True):
        assert torch.equal(a, b)


def test_scales_must_be_float16_numbers() -> None:
    with pytest.raises(ValueError, match="not representable in float16"):
        int4_matmul.pack(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[0.1]]), None, 32)


@on_each_device
def test_no_rows_on_cuda(device: Device) -> None:
    assert run_cuda_kernel(Int4Case("none", lead=(2, 0), n=40), device).shape == (2, 0, 40)


@on_each_isa
def test_no_rows_give_no_rows(isa: str) -> None:
    case = Int4Case("none", lead=(2, 0), n=40)
    inputs, attributes = node(case)
    (got,) = run_node(body_of(case.op.function), inputs, attributes, {"Y": 3}, CONSTANTS, isa)
    assert got.shape == (2, 0, 40)
