"""CausalConv and SelectiveScan: the references against loops in float64, body and kernels against the references."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch

from diffbit.ops import causal_conv, selective_scan
from diffbit.runtime import native

from .cases import MAMBA_CASES, MambaCase
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node
from .test_diff_attention import ROUNDING

cases = pytest.mark.parametrize("case", MAMBA_CASES, ids=lambda case: case.name)
ops = pytest.mark.parametrize("op", [causal_conv, selective_scan], ids=lambda op: op.OP.name)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def conv_by_the_book(case: MambaCase) -> list[np.ndarray]:
    x, weight, bias, mask, past = (tensor.double().numpy() for tensor in case.conv().values())
    y, states = np.zeros(x.shape), []
    for b in range(case.batch):
        rows = list(past[b])
        for t in range(case.steps):
            if not mask[b, case.before + t]:
                continue
            rows.append(x[b, t])
            for c in range(case.channels):
                y[b, t, c] = silu(bias[c] + sum(weight[k, c] * rows[k - case.width][c] for k in range(case.width)))
        states.append(rows[len(rows) - case.width + 1 :])
    return [y, np.array(states)]


def scan_by_the_book(case: MambaCase) -> list[np.ndarray]:
    x, dt, z, b_, c_, a, d, dt_bias, mask, past = (tensor.double().numpy() for tensor in case.scan().values())
    y, memory, h = np.zeros(x.shape), np.zeros(x.shape), past.copy()
    for b in range(case.batch):
        for t in range(case.steps):
            if not mask[b, case.before + t]:
                continue
            for c in range(case.channels):
                size = math.log1p(math.exp(dt[b, t, c] + dt_bias[c]))
                memory[b, t, c] = d[c] * x[b, t, c]
                for n in range(case.states):
                    h[b, n, c] = math.exp(size * a[n, c]) * h[b, n, c] + size * b_[b, t, n] * x[b, t, c]
                    memory[b, t, c] += c_[b, t, n] * h[b, n, c]
                y[b, t, c] = memory[b, t, c] * silu(z[b, t, c])
    return [y, memory, h]


@cases
def test_references_are_the_loops(case: MambaCase) -> None:
    if case.channels * case.steps > 2000:
        case = MambaCase(case.name, case.batch, case.steps, case.before, 20, case.width, 5, case.padding)
    for actual, expected in (
        (case.conv_reference(torch.float64), conv_by_the_book(case)),
        (case.scan_reference(torch.float64), scan_by_the_book(case)),
    ):
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == torch.float64
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-7, atol=1e-9)


def check(outputs: dict[str, np.ndarray], case: MambaCase, op: ModuleType) -> None:
    """Each output errs no more than twice what the reference of its type does, and some last bits."""
    reference = case.conv_reference if op is causal_conv else case.scan_reference
    for tensor, expected, exact in zip(op.OP.outputs, reference(), reference(torch.float64), strict=True):
        if (got := outputs.get(tensor.name)) is None:
            continue
        assert got.shape == tuple(expected.shape)
        right = exact.numpy()
        error, allowed = (
            np.abs(some.astype(np.float64) - right).max(initial=0) for some in (got, expected.float().numpy())
        )
        limit = 2 * allowed + 4 * ROUNDING[expected.dtype] * np.abs(right).max(initial=0)
        assert error <= limit, f"{tensor.name}: error {error:.3g}, the reference's {allowed:.3g}"


def named(op: ModuleType, outputs: list[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip((tensor.name for tensor in op.OP.outputs), outputs, strict=True))


def run(case: MambaCase, op: ModuleType, isa: str | None = None, threads: int = 1) -> list[np.ndarray]:
    inputs = (case.conv if op is causal_conv else case.scan)()
    return run_on(op, {name: tensor.numpy() for name, tensor in inputs.items()}, isa, threads)


def run_on(op: ModuleType, inputs: dict[str, np.ndarray], isa: str | None, threads: int = 1) -> list[np.ndarray]:
    names = [tensor.name for tensor in op.OP.outputs]
    weights = tuple(name for name in inputs if name in ("weight", "bias", "A", "D", "dt_bias"))
    attributes, outputs = {"spec_version": op.OP.version}, dict.fromkeys(names, 3)
    return run_node(body_of(op.function), inputs, attributes, outputs, weights, isa, threads, {"present_state": 1})


@ops
@cases
def test_body_is_the_reference(case: MambaCase, op: ModuleType) -> None:
    check(named(op, run(case, op)), case, op)


@ops
@on_isas_in_turn(MAMBA_CASES)
def test_kernel_is_the_reference(case: MambaCase, op: ModuleType, isa: str) -> None:
    one, two = (run(case, op, isa, threads) for threads in (1, 2))
    check(named(op, one), case, op)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@on_each_isa
def test_kernels_functions_are_right_to_a_few_ulp(isa: str) -> None:
    """A scan of one token and one state shows them one by one: softplus, SiLU, the exponential of a decay."""
    x = np.concatenate([np.linspace(-100, 100, 20011), np.linspace(-0.01, 0.01, 999)]).astype(np.float32)
    one, none = np.ones_like(x), np.zeros_like(x)

    def scan(
        dt: np.ndarray, z: np.ndarray, b: float, a: np.ndarray, d: np.ndarray, past: np.ndarray
    ) -> list[np.ndarray]:
        inputs = {"x": one[None, None], "dt": dt[None, None], "z": z[None, None]}
        inputs |= {"B": np.full((1, 1, 1), b, np.float32), "C": np.ones((1, 1, 1), np.float32)}
        inputs |= {"A": a[None], "D": d, "dt_bias": none, "attention_mask": np.ones((1, 1), np.int64)}
        return [array.reshape(-1) for array in run_on(selective_scan, inputs | {"past_state": past[None, None]}, isa)]

    def close(actual: np.ndarray, exact: np.ndarray) -> None:
        np.testing.assert_allclose(actual, exact, rtol=4e-7, atol=3e-36)  # where x is below e^-87.3 it is 0

    wide = x.astype(np.float64)
    close(scan(x, none, 1, -one, none, none)[1], np.logaddexp(0, wide))
    close(scan(x, x, 0, -one, one, none)[0], wide / (1 + np.exp(-wide)))
    size = np.float64(np.float32(np.log1p(np.exp(np.float64(0.5)))))
    rates = -np.abs(x)
    exponents = (np.float32(size) * rates).astype(np.float64)  # rounded, as the op has it
    close(scan(one * np.float32(0.5), none, 0, rates, none, one)[2], np.exp(exponents))


def parts(case: MambaCase, inputs: dict[str, np.ndarray], past: np.ndarray, part: slice) -> dict[str, np.ndarray]:
    """The inputs of a call with these tokens of a case's, after the others."""
    of_token = {name: inputs[name][:, part] for name in ("x", "dt", "z", "B", "C") if name in inputs}
    return {**inputs, **of_token, "attention_mask": inputs["attention_mask"][:, : part.stop], "past_state": past}


@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
@ops
def test_chunks_equal_a_prompt(op: ModuleType, isa: str | None) -> None:
    """Bit for bit: the state is all that the next call needs, wherever padding lies."""
    case = MambaCase("whole", batch=2, steps=40, channels=6, padding=(0, 1, 2, 12, 13, 30))
    inputs = {name: tensor.numpy() for name, tensor in (case.conv if op is causal_conv else case.scan)().items()}
    whole_y, *_, whole_state = run_on(op, inputs, isa)
    state, chunks = inputs["past_state"], []
    for start, stop in ((0, 1), (1, 3), (3, 20), (20, 21), (21, 40)):
        y, *_, state = run_on(op, parts(case, inputs, state, slice(start, stop)), isa)
        chunks.append(y)
    np.testing.assert_array_equal(np.concatenate(chunks, 1), whole_y)
    np.testing.assert_array_equal(state, whole_state)


def test_ten_thousand_tokens_do_not_drift() -> None:
    """In float32, states of slow decays included, against float64: errors settle and stay; kernels err no more."""
    case = MambaCase("long", steps=10_000, channels=2, states=16)
    inputs = case.scan()
    inputs["dt"], inputs["dt_bias"] = inputs["dt"] * 0.3 - 2, torch.zeros(2)  # step sizes about 0.13
    inputs["A"] = -torch.logspace(-2, 1, 16)[:, None].expand(16, 2)
    x, *others, dt_bias, _, past = inputs.values()
    reference, exact = (
        selective_scan.reference(x.to(dtype), *others, past, dt_bias)[1] for dtype in (x.dtype, torch.float64)
    )
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    kernels = [torch.from_numpy(run_on(selective_scan, arrays, isa)[1]) for isa in native.instruction_sets()]
    for outputs in (reference, *kernels):
        squares = (outputs - exact).square().unflatten(1, (4, -1)).mean((0, 2, 3))
        errors = (squares / exact.square().mean()).sqrt()  # of each quarter
        assert errors.max() < 2e-6 and errors[3] < 1.5 * errors[1], errors
