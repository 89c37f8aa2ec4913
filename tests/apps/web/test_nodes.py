"""The whole table of cases (tests/ops/cases.py) in WebAssembly, by SIMD128 and by the scalar kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ...native.host import read_results, record
from ...native.nodes import Equal, Node, nodes
from .modules import module, node

pytestmark = pytest.mark.slow

# SIMD128 multiplies and adds with two roundings where the other sets have one
ROUNDED = ("Int4MatMul", "Int8MatMul", "LowBitMatMul")
VARIANTS = [("wasm128", False, 1), ("wasm128", True, 1), ("wasm128", False, 3), ("scalar", False, 1)]
ROUNDINGS = {"wasm128": 16, "scalar": 1}  # of attention's outputs


def check(of: Node, got: list[np.ndarray], isa: str) -> None:
    if isa == "scalar" or of.op not in ROUNDED:
        return of.check(got)
    assert isinstance(of.check, Equal)
    (a,), (b,) = got, of.check.expected
    assert a.shape == b.shape and a.dtype == b.dtype
    unit = np.finfo(a.dtype).eps
    a, b = a.astype(np.float64), b.astype(np.float64)
    largest = np.abs(b[np.isfinite(b)]).max(initial=0)
    np.testing.assert_allclose(a, b, rtol=unit, atol=largest * (2**-20), equal_nan=True)


@pytest.mark.parametrize(("isa", "relaxed", "threads"), VARIANTS)
def test_every_case_gives_the_expected_arrays(isa: str, relaxed: bool, threads: int, tmp_path: Path) -> None:
    # the scalar sources are those that tests/native has tested: a few, to see that they are compiled right
    cases = [*nodes(ROUNDINGS[isa])][:: 1 if isa == "wasm128" else 5]
    recorded, results = tmp_path / "nodes", tmp_path / "results"
    recorded.write_bytes(b"".join(map(record, cases)))
    node("nodes.mjs", module(relaxed), recorded, results, isa, threads)
    outputs = read_results(results.read_bytes())
    assert [*outputs] == [case.name for case in cases]
    wrong = []
    for case in cases:
        got = outputs[case.name]
        if isinstance(got, str):
            wrong.append(f"{case.name}: {got}")
            continue
        try:
            check(case, got, isa)
        except AssertionError as error:
            wrong.append(f"{case.name}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)
