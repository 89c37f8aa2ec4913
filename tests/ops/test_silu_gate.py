"""SiluGate: the reference against float64, body and kernels against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffbit.ops import silu_gate

from ..native import cuda
from .cases import SILU_GATE_CASES, SiluGateCase
from .cuda_run import TYPES, Device, on_devices_in_turn
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node

cases = pytest.mark.parametrize("case", SILU_GATE_CASES, ids=lambda case: case.name)


def check(got: np.ndarray, case: SiluGateCase, sigmoid: float = 0) -> None:
    """Against float64, within a few roundings of each number. sigmoid: absolute error of its sigmoid."""
    g, u = np.split(case.inputs().double().numpy(), 2, axis=-1)
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * u
    precision = 2.0**-11 if case.dtype == torch.float16 else 2.0**-21
    least = 6e-8 if case.dtype == torch.float16 else 1e-36  # what subnormal numbers are rounded to
    assert got.shape == expected.shape and got.dtype == case.inputs().numpy().dtype
    assert (np.abs(got - expected) <= precision * np.abs(expected) + least + sigmoid * np.abs(g * u)).all()


def run(case: SiluGateCase, isa: str | None = None, threads: int = 1) -> np.ndarray:
    a, attributes = case.inputs(), {"spec_version": silu_gate.OP.version}
    (y,) = run_node(body_of(silu_gate.function), {"A": a.numpy()}, attributes, {"Y": a.dim()}, (), isa, threads)
    return y


@cases
def test_reference_and_body_are_silu_times_up(case: SiluGateCase) -> None:
    check(silu_gate.reference(case.inputs()).numpy(), case)
    check(run(case), case, sigmoid=2e-7)  # as ONNX Runtime computes it


@on_isas_in_turn(SILU_GATE_CASES)
def test_kernel_is_silu_times_up(case: SiluGateCase, isa: str) -> None:
    got = run(case, isa)
    check(got, case)
    assert np.array_equal(run(case, isa, threads=2), got)


@on_each_isa
def test_results_do_not_depend_on_the_position_in_a_row(isa: str) -> None:
    case = SiluGateCase("place", lead=(1,), n=37)
    a = case.inputs().numpy()
    full = run(case, isa)
    for n in (1, 5, 36):
        part = np.concatenate([a[:, :n], a[:, 37 : 37 + n]], axis=-1)
        attributes = {"spec_version": silu_gate.OP.version}
        (y,) = run_node(body_of(silu_gate.function), {"A": part}, attributes, {"Y": 2}, (), isa, 1)
        assert np.array_equal(y, full[:, :n])


@on_each_isa
def test_nan_spreads_no_further(isa: str) -> None:
    a = np.ones((1, 40), np.float32)
    a[0, 3], a[0, 20 + 7] = np.nan, np.nan
    attributes = {"spec_version": silu_gate.OP.version}
    (y,) = run_node(body_of(silu_gate.function), {"A": a}, attributes, {"Y": 2}, (), isa, 1)
    assert np.flatnonzero(np.isnan(y[0])).tolist() == [3, 7]


@on_devices_in_turn(SILU_GATE_CASES)
def test_cuda_kernel_is_silu_times_up(case: SiluGateCase, device: Device) -> None:
    a = case.inputs()
    x, y = device.put(a), device.poisoned((*case.lead, case.n), a.dtype)
    device.run(cuda.SiluGate(x.data_ptr(), y.data_ptr(), a.numel() // (2 * case.n), case.n, TYPES[a.dtype]))
    check(y.cpu().numpy(), case)


@on_each_isa
def test_no_rows_give_no_rows(isa: str) -> None:
    case = SiluGateCase("none", lead=(2, 0))
    assert run(case).shape == run(case, isa).shape == (2, 0, 64)
