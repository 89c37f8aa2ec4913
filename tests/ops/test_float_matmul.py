"""FloatMatMul: body and kernels against float64, and every kernel against the others, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffbit.ops import float_matmul

from ..native import cuda
from .cases import generator
from .cuda_run import TYPES, Device, on_each_device
from .onnx_run import body_of, on_each_isa, run_node

LANES = 16  # sums that the definition adds to in turn
cases = pytest.mark.parametrize(  # a is [2, rows, k]; 241: more rows than are floats at a time
    ("rows", "k", "n"), [(1, 64, 40), (3, 201, 33), (9, 16, 7), (5, 7, 1), (4, 576, 130), (241, 77, 30)]
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def inputs(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(rows)
    return torch.randn(2, rows, k, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype)


def by_the_book(a: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """Sixteen sums by fma (exact in float64 but for one rounding of these products), then pairs."""
    pad = -a.shape[-1] % LANES
    x, w = (torch.nn.functional.pad(t.double(), (0, pad)) for t in (a, weight))
    sums = torch.zeros(*a.shape[:-1], len(w), LANES)
    for c in range(0, x.shape[-1], LANES):
        part = slice(c, c + LANES)
        sums = (x[..., None, part] * w[:, part] + sums.double()).float()
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0].to(a.dtype).numpy()


def node(a: torch.Tensor, weight: torch.Tensor) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    return {"A": a.numpy(), "W": weight.numpy()}, {"spec_version": float_matmul.OP.version}


@cases
@dtypes
def test_body_is_the_reference(rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, weight = inputs(rows, k, n, dtype)
    (got,) = run_node(body_of(float_matmul.function), *node(a, weight), {"Y": 3}, ("W",))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    expected = float_matmul.reference(a, weight)
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=tolerance, atol=tolerance * k**0.5)


@on_each_isa
@cases
@dtypes
def test_kernel_is_exact(rows: int, k: int, n: int, dtype: torch.dtype, isa: str) -> None:
    a, weight = inputs(rows, k, n, dtype)
    one, two = (
        run_node(body_of(float_matmul.function), *node(a, weight), {"Y": 3}, ("W",), isa, threads)[0]
        for threads in (1, 2)
    )
    assert np.array_equal(one, two) and np.array_equal(one, by_the_book(a, weight))


@on_each_device
@cases
def test_cuda_kernel_is_the_reference(rows: int, k: int, n: int, device: Device) -> None:
    for dtype in TYPES:
        a, weight = inputs(rows, k, n, dtype)
        y = device.poisoned((2, rows, n), dtype)
        operands = device.put(a), device.put(weight)
        device.run(cuda.FloatMatMul(*(x.data_ptr() for x in (*operands, y)), 2 * rows, n, k, TYPES[dtype]))
        expected = float_matmul.reference(a, weight)
        torch.testing.assert_close(
            y.cpu().float(), expected.float(), rtol=0, atol=float(1e-2 * expected.float().abs().max())
        )


@on_each_device
def test_cuda_kernel_of_a_weight_without_rows(device: Device) -> None:
    a, nothing = device.put(torch.ones(2, 64)), device.poisoned((0, 64), torch.float32)
    device.run(cuda.FloatMatMul(a.data_ptr(), nothing.data_ptr(), nothing.data_ptr(), 2, 0, 64, cuda.FLOAT32))
