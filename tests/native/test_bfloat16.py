"""Products of many rows in bfloat16 (a session's diffbit.bfloat16): of weights against float64 products of rounded
operands, of attention within bfloat16's roundings; by matrix instructions, and emulated under sanitizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from diffbit.ops import lowbit_matmul
from diffbit.runtime import native

from ..ops.cases import ATTENTION_CASES, INT4_CASES, INT8_CASES, LOWBIT_CASES, Int4Case, LowBitCase
from ..ops.test_diff_attention import ROUNDING
from . import nodes, sessions
from .host import build
from .nodes import Node, array

Run = Callable[[Sequence[Node]], dict[str, list[np.ndarray] | str]]


def on_processor(cases: Sequence[Node]) -> dict[str, list[np.ndarray] | str]:
    return {node.name: sessions.run(sessions.session(node, "amx", threads=2, bfloat16="1"), node) for node in cases}


def emulated(cases: Sequence[Node]) -> dict[str, list[np.ndarray] | str]:
    return build("sanitized").run(cases, "amx", threads=2, options={"diffbit.bfloat16": "1"})


on_both = pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            on_processor,
            marks=pytest.mark.skipif("amx" not in native.instruction_sets(), reason="this processor has no AMX"),
        ),
        pytest.param(emulated, marks=pytest.mark.slow),
    ],
    ids=lambda run: run.__name__,
)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The bfloat16 nearest to each float32, of two the one farther from 0; NaN for what is not finite."""
    nearest = ((x.float().view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), nearest, torch.nan)


def weight_of(case: Int4Case) -> torch.Tensor:
    """[N, K] in float32."""
    if isinstance(case, LowBitCase):
        codes, scale, row_scale, levels = case.weight()
        values = codes.float() - 2 ** (case.bits - 1) if levels is None else lowbit_matmul.values(codes, levels).float()
        of_row = torch.ones(()) if row_scale is None else row_scale.float()
    else:
        _, codes, scale, zero, _ = case.inputs()
        middle = torch.tensor(2 ** (case.bits - 1))
        of_row = torch.ones(())
        zeros = middle if zero is None else zero.int()
        spread = zeros.repeat_interleave(case.group, 1)[:, : case.k] if zeros.ndim and not case.row_scale else zeros
        values = (codes.int() - spread).float()
    scales = scale.float() * (of_row * case.factor)
    return values * (scales if case.row_scale else scales.repeat_interleave(case.group, 1)[:, : case.k])


MANY = 24  # more rows than these are multiplied in bfloat16 (csrc/cpu/simd/amx.h)
SIZES = (
    Int4Case("ragged", lead=(49,), k=200, n=37, seed=4),
    Int4Case("odd", lead=(33,), k=131, n=17, group=128, symmetric=False, seed=7),
    Int4Case("short", lead=(31,), k=5, n=1, group=64, seed=6),
    Int4Case("wide", lead=(2, 40), k=1600, n=280, factor=0.37, seed=5),
    Int4Case("wild", lead=(48,), k=96, n=48, fill="wild", seed=10),
    Int4Case("huge", lead=(36,), k=96, fill="huge", seed=9),
    Int4Case("far", lead=(40,), k=160, n=80, symmetric=False, fill="far"),
    Int4Case("many", lead=(1100,), k=1600, n=40, seed=14),  # does not fit in a core's cache
    Int4Case("int8", lead=(70,), k=160, n=80, bits=8, seed=14),
    Int4Case("int8_row_scale", lead=(35,), k=200, n=300, bits=8, row_scale=True, seed=2),
    Int4Case("int8_asymmetric", lead=(32,), k=328, n=100, group=128, symmetric=False, bits=8, seed=5),
    Int4Case("float16", lead=(34,), k=256, n=52, symmetric=False, dtype=torch.float16, seed=12),
)
CASES = [case for case in (*SIZES, *INT4_CASES, *INT8_CASES, *LOWBIT_CASES) if np.prod(case.lead) > MANY]


def node_of(case: Int4Case) -> Node:
    return nodes.lowbit(case) if isinstance(case, LowBitCase) else nodes.int4(case)


@on_both
def test_products_of_weights(run: Run) -> None:
    found = {case: replace(node_of(case), name=f"{i}/{case.name}") for i, case in enumerate(CASES)}
    results = run(list(found.values()))
    assert len(found) > 25
    for case, node in found.items():
        (got,) = results[node.name]
        a, weight = rounded(case.inputs()[0]).double(), rounded(weight_of(case)).double()
        expected, size = (a @ weight.T).numpy(), (a.abs() @ weight.abs().T).numpy()
        assert got.shape == expected.shape and got.dtype == array(case.inputs()[0]).dtype
        assert np.array_equal(np.isnan(got), np.isnan(expected)), case.name
        half = 1e-3 * np.abs(expected) if case.dtype == torch.float16 else 0
        assert np.all((np.abs(got - expected) <= 2e-6 * size + half) | np.isnan(expected)), case.name


@on_both
def test_no_nan_is_lost(run: Run) -> None:
    """Whatever its payload, where rounding could carry into the sign."""
    payloads = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    product = nodes.int4(Int4Case("product", lead=(40,), k=96, n=48))
    a = product.inputs["A"].copy()
    a[3:5, 7] = payloads
    case = next(case for case in ATTENTION_CASES if case.dtype == torch.float32 and case.steps > 20 and not case.past)
    whole = nodes.attention(case)
    value = whole.inputs["value"].copy()
    value[:, 9, :2] = payloads
    results = run([
        replace(product, inputs=product.inputs | {"A": a}),
        replace(whole, inputs=whole.inputs | {"value": value}),
    ])  # fmt: skip
    (y,), (out, *_) = results[product.name], results[whole.name]
    assert np.isnan(y).all(1).nonzero()[0].tolist() == [3, 4] and np.isnan(y).any(1).sum() == 2
    assert np.isnan(out[:, 9:]).any(2).all()


@on_both
def test_few_rows_are_computed_as_defined(run: Run) -> None:
    cases = [node_of(case) for case in INT4_CASES + INT8_CASES + LOWBIT_CASES if np.prod(case.lead) <= MANY]
    assert len(cases) > 50
    for node, got in zip(cases, run(cases).values(), strict=True):
        assert not isinstance(got, str), got
        node.check(got)


@on_both
def test_attention(run: Run) -> None:
    """Scores and probabilities are rounded, each to 2^-9 of its size, and a norm enlarges what subtraction leaves."""
    cases = {
        dtype: [case for case in ATTENTION_CASES if case.dtype == dtype] for dtype in (torch.float32, torch.float16)
    }
    found = [nodes.attention(case, roundings=round(0.03 / ROUNDING[dtype])) for dtype in cases for case in cases[dtype]]
    for node, got in zip(found, run(found).values(), strict=True):
        assert not isinstance(got, str), got
        try:
            node.check(got)
        except AssertionError as error:
            pytest.fail(f"{node.name}: {error}")


@pytest.mark.skipif(not native.instruction_sets(), reason="there is no library")
def test_sessions_of_both_kinds_side_by_side() -> None:
    """Whichever is opened first."""
    node = nodes.int4(SIZES[0])
    isa = native.instruction_sets()[0]
    plain, rounded, again = (sessions.session(node, isa, bfloat16=value) for value in "010")
    (expected,), (other,), (same,) = (sessions.run(one, node) for one in (plain, rounded, again))
    assert np.array_equal(expected, same) and np.array_equal(expected, other) == (isa != "amx")


@pytest.mark.skipif(not native.instruction_sets(), reason="there is no library")
@pytest.mark.parametrize("value", ["yes", "", "1" * 100])
def test_any_other_value_is_an_error(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"diffbit\.bfloat16 can only be 0 or 1"):
        sessions.session(nodes.int4(INT4_CASES[0]), "scalar", bfloat16=value)
