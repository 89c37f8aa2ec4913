"""Shapes that nobody wrote down, in the host under sanitizers: every kernel against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffbit.ops import causal_conv, int4_matmul, selective_scan

from ..ops.cases import (
    LOWBIT_KINDS,
    AttentionCase,
    HadamardCase,
    Int4Case,
    LowBitCase,
    MambaCase,
    SiluGateCase,
    TernaryCase,
)
from .host import build
from .nodes import Node, attention, gated, int4, lowbit, mamba, ternary, transform
from .test_host import differences

pytestmark = pytest.mark.slow

FLOATS = (torch.float32, torch.float16)
LEADS = st.one_of(st.tuples(st.integers(1, 20)), st.tuples(st.integers(1, 3), st.integers(1, 7)))


def matmuls(fills: tuple[str, ...]) -> dict[str, st.SearchStrategy]:
    return {
        "lead": LEADS,
        "k": st.integers(1, 700),
        "n": st.integers(1, 150),
        "fill": st.sampled_from(fills),
        "dtype": st.sampled_from(FLOATS),
        "seed": st.integers(0, 1000),
    }


TERNARY = st.builds(
    TernaryCase,
    st.just("any"),
    **matmuls(("normal", "ones", "minus", "zero", "tiny", "outliers")),
    bits=st.sampled_from((8, 4)),
    per_row=st.booleans(),
)
INT4 = st.builds(
    Int4Case,
    st.just("any"),
    **matmuls(("normal", "low", "high", "zero", "tiny")),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    symmetric=st.booleans(),
    factor=st.sampled_from((1.0, 0.37)),
)

LOWBIT = st.builds(
    lambda kind, **more: LowBitCase("any", bits=kind[0], table=kind[1], **more),
    st.sampled_from(LOWBIT_KINDS),
    **matmuls(("normal", "low", "high", "zero", "tiny")),
    group=st.sampled_from(int4_matmul.GROUP_SIZES),
    int8_scales=st.booleans(),
)


SILU_GATE = st.builds(
    SiluGateCase,
    name=st.just("any"),
    lead=LEADS,
    n=st.integers(1, 300),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 1000),
)


@st.composite
def hadamards(draw: st.DrawFn) -> HadamardCase:
    block = 1 << draw(st.integers(0, 11))
    return HadamardCase(
        "any",
        lead=draw(LEADS),
        k=block * draw(st.integers(1, 5)),
        block=block,
        dtype=draw(st.sampled_from(FLOATS)),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def mambas(draw: st.DrawFn) -> MambaCase:
    steps, before = draw(st.integers(0, 50)), draw(st.integers(0, 9))
    return MambaCase(
        "any",
        batch=draw(st.integers(1, 3)),
        steps=steps,
        before=before,
        channels=draw(st.integers(1, 700)),
        width=draw(st.integers(2, 7)),
        states=draw(st.integers(1, 20)),
        padding=tuple(draw(st.sets(st.integers(0, steps + before - 1)))) if steps + before else (),
        dtype=draw(st.sampled_from(FLOATS)),
        seed=draw(st.integers(0, 1000)),
    )


def any_mamba(case: MambaCase) -> Node:
    return mamba(causal_conv if case.seed % 2 else selective_scan, case, in_place=case.seed % 3 == 0)


@st.composite
def attentions(draw: st.DrawFn) -> AttentionCase:
    branches, groups, pairs = draw(st.sampled_from((2, 2, 1))), draw(st.integers(1, 2)), draw(st.integers(1, 9))
    ratio = draw(st.sampled_from([n for n in (1, 2, 3, 4) if pairs % n == 0])) if branches == 2 else 1
    wide = branches == 2 and draw(st.booleans())
    key_bits, value_bits = (draw(st.sampled_from((16, 8, 4, 3, 2))) for _ in range(2))
    any_d = 2 * draw(st.one_of(st.integers(1, 12), st.sampled_from((16, 20, 32, 40, 64))))
    return AttentionCase(
        "any",
        batch=draw(st.integers(1, 2)),
        steps=draw(st.one_of(st.just(1), st.integers(2, 30))),
        past=draw(st.one_of(st.integers(0, 40), st.integers(240, 530))),
        beyond=draw(st.one_of(st.none(), st.integers(0, 9))),
        heads=groups * pairs,
        kv_heads=groups * (1 + wide),
        d=any_d if min(key_bits, value_bits) > 4 else draw(st.sampled_from((32, 64, 96, 128))),
        wide_value=wide,
        # not less: where A1 - lambda A2 cancels, the norm makes the last bits of the reference itself large
        norm_eps=draw(st.sampled_from((0.1, 0.0))) if wide else 0.0,
        token_lambda=branches == 2 and draw(st.booleans()),
        padding=draw(st.sampled_from(("none", "left", "right"))),
        dtype=draw(st.sampled_from(FLOATS)),
        cache=draw(st.sampled_from((None, *FLOATS))),
        branches=branches,
        noise_ratio=ratio,
        key_bits=key_bits,
        value_bits=value_bits,
        query_bits=draw(st.sampled_from((0, 8, 4))) if key_bits < 16 else 0,
        window=draw(st.sampled_from((0, 20, 32))),
        first=draw(st.sampled_from((0, 1, 4, 16))),
        seed=draw(st.integers(0, 1000)),
    )


def any_attention(case: AttentionCase) -> Node:
    """Of thousands of small outputs the reference gets some right to the last bit; a kernel gets others right."""
    return attention(case, in_place=case.beyond is not None and case.seed % 2 == 0, roundings=10)


OPS = {
    "ternary": (ternary, TERNARY),
    "int4": (int4, INT4),
    "lowbit": (lowbit, LOWBIT),
    "hadamard": (transform, hadamards()),
    "silu_gate": (gated, SILU_GATE),
    "mamba": (any_mamba, mambas()),
    "attention": (any_attention, attentions()),
}


@pytest.mark.parametrize("op", OPS)
def test_any_shape_gives_the_expected_arrays(op: str) -> None:
    host = build("sanitized")
    node_of, cases = OPS[op]
    numbers = itertools.cycle((1, 2))  # of threads

    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.large_base_example])
    @given(st.lists(cases, min_size=8, max_size=8))
    def check(some: list[Any]) -> None:
        nodes = [replace(node_of(case), name=str(i)) for i, case in enumerate(some)]
        for isa in host.instruction_sets:
            threads = next(numbers)
            results = host.run(nodes, isa, threads)
            for node, case in zip(nodes, some, strict=True):
                wrong = differences(results[node.name], node)
                assert not wrong, f"{isa}, {threads} threads: {case}: {wrong}"

    check()
