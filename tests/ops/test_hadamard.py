"""Hadamard: the reference against Hadamard's matrix and a slow loop, body and kernels against the reference's bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from diffbit.ops import hadamard

from ..native import cuda
from .cases import HADAMARD_CASES, HadamardCase
from .cuda_run import TYPES, Device, on_devices_in_turn
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node

cases = pytest.mark.parametrize("case", HADAMARD_CASES, ids=lambda case: case.name)


def by_the_book(a: np.ndarray, block: int) -> np.ndarray:
    """Stage by stage as the docstring says."""
    x = a.astype(np.float32).reshape(-1)
    for s in (1 << i for i in range(block.bit_length() - 1)):
        u = [i for i in range(len(x)) if not i & s]
        v = [i + s for i in u]
        x[u], x[v] = x[u] + x[v], x[u] - x[v]
    return (x * np.float32(1 / math.sqrt(block))).reshape(a.shape).astype(a.dtype)


@cases
def test_reference_is_the_slow_version(case: HadamardCase) -> None:
    a = case.inputs()
    before = a.clone()
    got = hadamard.reference(a, case.block)
    assert torch.equal(a, before) and got.dtype == case.dtype
    assert np.array_equal(got.numpy(), by_the_book(a.numpy(), case.block))


@pytest.mark.parametrize("case", [case for case in HADAMARD_CASES if case.k <= 1024], ids=lambda case: case.name)
def test_reference_is_the_product_with_hadamards_matrix(case: HadamardCase) -> None:
    indices = range(case.block)
    signs = torch.tensor([[1 - 2 * ((i & j).bit_count() % 2) for j in indices] for i in indices]).double()
    a = case.inputs().double().unflatten(-1, (-1, case.block))
    expected = (a @ signs / math.sqrt(case.block)).flatten(-2)
    error = (hadamard.reference(case.inputs(), case.block).double() - expected).abs().max()
    assert error <= (1e-3 if case.dtype == torch.float16 else 1e-6) * a.abs().max()


def run(case: HadamardCase, isa: str | None = None, threads: int = 1) -> np.ndarray:
    a = case.inputs()
    attributes = {"block": case.block, "spec_version": hadamard.OP.version}
    (y,) = run_node(body_of(hadamard.function), {"A": a.numpy()}, attributes, {"Y": a.dim()}, (), isa, threads)
    return y


@cases
def test_body_is_exact(case: HadamardCase) -> None:
    assert np.array_equal(run(case), hadamard.reference(case.inputs(), case.block).numpy())


@on_isas_in_turn(HADAMARD_CASES)
def test_kernel_is_exact(case: HadamardCase, isa: str) -> None:
    expected = hadamard.reference(case.inputs(), case.block).numpy()
    for threads in (1, 2):
        assert np.array_equal(run(case, isa, threads), expected)


# Several blocks of threads and a part of one; the workspace's numbers as float16; a second pass through it
CUDA_CASES = [
    *HADAMARD_CASES,
    HadamardCase("tiles", lead=(5,), k=3 * 512, block=512),
    HadamardCase("tile", lead=(3,), k=4096, block=4096, dtype=torch.float16),
    HadamardCase("further_fp16", lead=(2,), k=3 << 14, block=1 << 14, dtype=torch.float16),
    HadamardCase("furthest", lead=(1,), k=1 << 17, block=1 << 17),
]


@on_devices_in_turn(CUDA_CASES)
def test_cuda_kernel_is_exact(case: HadamardCase, device: Device) -> None:
    a = case.inputs()
    x, y = device.put(a), device.poisoned(a.shape, a.dtype)
    device.run(cuda.Hadamard(x.data_ptr(), y.data_ptr(), a.numel(), case.block, TYPES[a.dtype]))
    assert np.array_equal(y.cpu().numpy(), hadamard.reference(a, case.block).numpy())


@on_each_isa
def test_no_rows_give_no_rows(isa: str) -> None:
    case = HadamardCase("none", lead=(2, 0))
    assert run(case).shape == run(case, isa).shape == (2, 0, 128)


@pytest.mark.parametrize(("columns", "block"), [(1, 1), (7, 1), (96, 32), (2048, 2048), (6912, 256)])
def test_block_size(columns: int, block: int) -> None:
    assert hadamard.block_size(columns) == block
