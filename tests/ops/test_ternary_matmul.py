"""TernaryMatMul: the reference against integers in numpy, the body against the reference, bit for bit."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.ops import ternary_matmul

from ..native import cuda
from .cases import TERNARY_CASES, TernaryCase
from .cuda_run import TYPES, Device, on_devices_in_turn, on_each_device
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node

cases = pytest.mark.parametrize("case", TERNARY_CASES, ids=lambda case: case.name)


def by_the_book(a: np.ndarray, weight: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Row by row with int64 sums and float32 steps in the order that the docstring gives; sums of |x| in rationals."""
    rows = a.astype(np.float32).reshape(-1, a.shape[-1])
    out = np.empty((len(rows), len(weight)), np.float32)
    for i, x in enumerate(rows):
        if bits == 8:
            step = max(np.abs(x).max(), np.float32(1e-5)) / np.float32(127)
            q = np.round(x / step).astype(np.int64)  # numpy rounds halves to even
        else:
            grid = 2 * len(x) * float(np.abs(x).max())
            total = sum(Fraction((abs(value) + grid) - grid) for value in x.astype(float).tolist())
            step = max(np.float32(float(total) / len(x)), np.float32(1e-5)) / np.float32(math.sqrt(7))
            q = np.round(x / step).clip(-8, 7).astype(np.int64)
        for n, w in enumerate(weight):
            out[i, n] = np.float32(int(q @ w.astype(np.int64))) * step * scale[n % len(scale)]
    return out.reshape(*a.shape[:-1], len(weight)).astype(a.dtype)


@cases
def test_reference_is_exact(case: TernaryCase) -> None:
    a, weight, scale = case.inputs()
    got = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale, case.bits)
    expected = by_the_book(a.numpy(), weight.numpy(), scale.numpy(), case.bits)
    assert got.dtype == case.dtype and np.array_equal(got.numpy(), expected)


@cases
def test_body_is_exact(case: TernaryCase) -> None:
    a, weight, scale = case.inputs()
    packed = ternary_matmul.pack(weight)
    inputs = {"A": a.numpy(), "packed": packed.numpy(), "scale": scale.numpy()}
    attributes = {"K": case.k, "N": case.n, "activation_bits": case.bits, "spec_version": 2}
    (got,) = run_node(
        body_of(ternary_matmul.function), inputs, attributes, {"Y": a.dim()}, constants=("packed", "scale")
    )
    assert np.array_equal(got, ternary_matmul.reference(a, packed, scale, case.bits).numpy())


def run_kernel(
    a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, isa: str, threads: int = 1, bits: int = 8
) -> np.ndarray:
    packed = ternary_matmul.pack(weight)
    inputs = {"A": a.numpy(), "packed": packed.numpy(), "scale": scale.numpy()}
    attributes = {"K": weight.shape[1], "N": weight.shape[0], "activation_bits": bits, "spec_version": 2}
    constants = ("packed", "scale")
    (y,) = run_node(body_of(ternary_matmul.function), inputs, attributes, {"Y": a.dim()}, constants, isa, threads)
    return y


@on_isas_in_turn(TERNARY_CASES)
def test_kernel_is_exact(case: TernaryCase, isa: str) -> None:
    a, weight, scale = case.inputs()
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale, case.bits)
    assert np.array_equal(run_kernel(a, weight, scale, isa, bits=case.bits), expected.numpy())


@on_each_isa
def test_any_number_of_threads_gives_the_same(isa: str) -> None:
    a, weight, scale = TernaryCase("threads", lead=(130,), k=384, n=517, seed=20).inputs()
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale).numpy()
    for threads in (1, 2, 4):
        assert np.array_equal(run_kernel(a, weight, scale, isa, threads), expected)
        assert np.array_equal(run_kernel(a[:1], weight, scale, isa, threads), expected[:1])


# Numbers of rows around a product's, K and N around a tile's; tiles of both sizes; blocks with more tiles than sums fit
CUDA_CASES = [
    *TERNARY_CASES,
    *(
        TernaryCase(f"around_{m}", lead=(m,), k=515, n=61, dtype=torch.bfloat16, seed=30 + m)
        for m in (1, 7, 16, 17, 33)
    ),
    *(TernaryCase(f"few_{m}", lead=(m,), k=1030, n=300, bits=4, seed=40 + m) for m in (1, 2, 8, 9)),
    TernaryCase("more_rows_than_fit", lead=(8,), k=3000, n=100, seed=50),
    TernaryCase("more_tiles_than_fit", lead=(16,), k=100, n=1500, seed=51),
    TernaryCase("extreme_16", lead=(16,), k=8192, n=20, fill="minus"),
    TernaryCase("extreme_prefill", lead=(40,), k=8192, n=20, fill="ones"),
    TernaryCase("large_tiles", lead=(300,), k=390, n=517, dtype=torch.float16, seed=52),
    TernaryCase("large_tiles_even", lead=(257,), k=256, n=514, dtype=torch.bfloat16, seed=53),
    TernaryCase("large_tiles_fp32", lead=(257,), k=130, n=512, bits=4, seed=54),
    TernaryCase("large_tiles_per_row", lead=(260,), k=130, n=515, dtype=torch.bfloat16, seed=56, per_row=True),
    *(
        TernaryCase(f"few_per_row_{m}", lead=(m,), k=1030, n=301, dtype=torch.float16, seed=57 + m, per_row=True)
        for m in (8, 16)
    ),
]


def run_cuda_kernel(
    device: Device, a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bits: int = 8
) -> torch.Tensor:
    n, k = weight.shape
    x, packed, scales = (device.put(tensor) for tensor in (a, ternary_matmul.pack(weight), scale))
    y = device.poisoned((*a.shape[:-1], n), a.dtype)
    pointers = (tensor.data_ptr() for tensor in (x, packed, scales, y))
    device.run(cuda.TernaryMatMul(*pointers, a.numel() // k, n, k, bits, len(scale) == n, TYPES[a.dtype]))
    return y.cpu()


@on_devices_in_turn(CUDA_CASES)
def test_cuda_kernel_is_exact(case: TernaryCase, device: Device) -> None:
    a, weight, scale = case.inputs()
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale, case.bits)
    assert torch.equal(run_cuda_kernel(device, a, weight, scale, case.bits), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_cuda_kernel_with_more_shared_memory_is_exact(rows: int) -> None:
    a, weight, scale = TernaryCase("large", lead=(rows,), k=3000, n=1100, seed=55).inputs()
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale)
    with mock.patch.dict(os.environ, {"DIFFBIT_EMULATE_SHARED": str(227 << 10)}):
        assert torch.equal(run_cuda_kernel(Device("cpu"), a, weight, scale), expected)


@on_each_device
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 700),
    n=st.integers(1, 150),
    dtype=st.sampled_from(list(TYPES)),
    bits=st.sampled_from((8, 4)),
    per_row=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_cuda_kernel_at_any_shape(
    device: Device, rows: int, columns: int, n: int, dtype: torch.dtype, bits: int, per_row: bool, seed: int
) -> None:
    a, weight, scale = TernaryCase("any", (rows,), columns, n, "outliers", dtype, seed, per_row=per_row).inputs()
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale, bits)
    assert torch.equal(run_cuda_kernel(device, a, weight, scale, bits), expected)


@on_each_device
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [6, 12, 20])
def test_a_row_with_no_finite_step_is_nan_on_cuda(device: Device, rows: int, bits: int) -> None:
    a, weight, scale = TernaryCase("odd", lead=(rows,), k=200, dtype=torch.float16, seed=21).inputs()
    a[0, 3], a[2, 199], a[4, 77] = math.nan, math.inf, -math.inf
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale, bits)
    got = run_cuda_kernel(device, a, weight, scale, bits)
    assert np.array_equal(got.numpy(), expected.numpy(), equal_nan=True) and torch.isnan(got[:5:2]).all()


@on_each_isa
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_with_no_finite_step_is_nan(isa: str, dtype: torch.dtype, bits: int) -> None:
    a, weight, scale = TernaryCase("odd", lead=(6,), k=200, dtype=dtype, seed=21).inputs()
    a[0, 3], a[2, 199], a[4, 77] = math.nan, math.inf, -math.inf
    expected = ternary_matmul.reference(a, ternary_matmul.pack(weight), scale, bits).numpy()
    assert np.isnan(expected[::2]).all() and np.isfinite(expected[1::2]).all()
    assert np.array_equal(run_kernel(a, weight, scale, isa, bits=bits), expected, equal_nan=True)


@on_each_device
def test_no_rows_on_cuda(device: Device) -> None:
    _, weight, scale = TernaryCase("none").inputs()
    assert run_cuda_kernel(device, torch.empty(2, 0, weight.shape[1]), weight, scale).shape == (2, 0, len(weight))


@on_each_isa
def test_no_rows_give_no_rows(isa: str) -> None:
    _, weight, scale = TernaryCase("none").inputs()
    assert run_kernel(torch.empty(2, 0, weight.shape[1]), weight, scale, isa).shape == (2, 0, len(weight))


def test_layout_is_the_documented_one() -> None:
    weight = torch.zeros(1, 256, dtype=torch.int8)
    weight[0, 3] = 1  # block 0, byte 3, bits 0-1
    weight[0, 32 + 3] = -1  # bits 2-3
    weight[0, 128 + 96 + 31] = 1  # block 1, byte 31, bits 6-7
    packed = ternary_matmul.pack(weight)
    assert packed.shape == (1, 64)
    assert packed[0, 3] == 0b01_01_00_10
    assert packed[0, 63] == 0b10_01_01_01
    assert set(packed[0].tolist()) == {0b01010101, 0b01010010, 0b10010101}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), columns=st.integers(1, 400), seed=st.integers(0, 2**31))
def test_unpack_undoes_pack(rows: int, columns: int, seed: int) -> None:
    weight = torch.randint(-1, 2, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    assert torch.equal(ternary_matmul.unpack(ternary_matmul.pack(weight), columns), weight)
