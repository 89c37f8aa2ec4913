"""The whole table of cases, on every instruction set, under sanitizers, on an emulated ARM processor, on wine and musl.

The host (host.cpp) holds every tensor in a block of exactly its size, computes each node by two callers at once
where there is more than one thread, and turns the order of tasks around: the bits must not change.
"""

from __future__ import annotations

import functools
import platform

import numpy as np
import pytest

from .host import build
from .nodes import Node, nodes

pytestmark = pytest.mark.slow

HERE = platform.machine()
SETS = ["amx", "avx512vnni", "avx2", "neon", "scalar"]
HOSTS = [("sanitized", isa) for isa in SETS if isa != "neon" or HERE == "aarch64"]
HOSTS += [
    ("threads", "neon" if HERE == "aarch64" else "avx2"),
    *(("aarch64", isa) for isa in ("i8mm", "neon", "scalar")),
    *(("x86_64-windows", isa) for isa in ("avx512vnni", "avx2", "scalar") if HERE == "x86_64"),
    *(("x86_64-musl", isa) for isa in ("avx512vnni", "avx2") if HERE == "x86_64"),
    *(("aarch64-musl", isa) for isa in ("i8mm", "neon")),
]


@functools.cache
def table() -> tuple[Node, ...]:
    return tuple(nodes())


def differences(got: list[np.ndarray] | str, node: Node) -> str | None:
    if isinstance(got, str):
        return f"{node.name}: {got}"
    try:
        node.check(got)
    except AssertionError as error:
        return f"{node.name}: {error}"
    return None


@pytest.mark.parametrize(("kind", "isa"), HOSTS, ids=lambda value: value)
def test_every_case_gives_the_expected_arrays(kind: str, isa: str) -> None:
    host = build(kind)
    if isa not in host.instruction_sets:
        pytest.skip(f"this CPU has no {isa}; it has {', '.join(host.instruction_sets)}")
    cases = table()
    if kind == "aarch64-musl":  # slow, and "aarch64" tests the same source
        cases = cases[::8]
    elif (kind, isa) in (("aarch64", "scalar"), ("aarch64", "neon")):
        # slow there; "sanitized" has tested the very source of one, "i8mm" that of the other, but for many rows
        cases = tuple(node for i, node in enumerate(cases) if not i % 4 or (isa == "neon" and "MatMul" in node.op))
    runs = {threads: host.run(cases, isa, threads) for threads in (1, 4)}
    assert [*runs[1]] == [node.name for node in cases]
    wrong = [text for node in cases if (text := differences(runs[1][node.name], node))]
    assert not wrong, "\n".join(wrong)
    for node in cases:
        one, many = runs[1][node.name], runs[4][node.name]
        assert not isinstance(one, str) and not isinstance(many, str), f"{node.name}, 4 threads: {many}"
        same = [a.tobytes() == b.tobytes() for a, b in zip(one, many, strict=True)]
        assert all(same), f"{node.name}: other bits with 4 threads"
