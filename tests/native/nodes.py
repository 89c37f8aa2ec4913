"""The tables of cases as nodes: what each takes, and what its outputs must be. A new op joins in NODES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from diffbit.ops import int4_matmul, ternary_matmul

from ..ops.cases import INT4_CASES, TERNARY_CASES, Int4Case, TernaryCase


@dataclass(frozen=True)
class Output:
    """An output of a node; `shared` is the input whose memory it takes, as present takes past's."""

    name: str
    dtype: np.dtype
    rank: int
    shared: str | None = None


@dataclass(frozen=True)
class Node:
    """One run of one op. `check` raises where the outputs are not what they must be."""

    name: str
    op: str
    attributes: dict[str, int | float]
    inputs: dict[str, np.ndarray | None]  # in the op's order; None: omitted
    outputs: tuple[Output, ...]
    check: Callable[[list[np.ndarray]], None]
    constants: tuple[str, ...] = ()  # inputs that are weights


def equal(*wanted: np.ndarray) -> Callable[[list[np.ndarray]], None]:
    """A check for the same bits."""

    def check(got: list[np.ndarray]) -> None:
        for a, b in zip(got, wanted, strict=True):
            assert a.shape == b.shape, f"shape {a.shape}, wanted {b.shape}"
            assert a.dtype == b.dtype, f"{a.dtype}, wanted {b.dtype}"
            wrong = a.view(np.uint8) != b.view(np.uint8)
            assert not wrong.any(), (
                f"{wrong.sum()} of {wrong.size} bytes differ: {a.ravel()[:4]}, wanted {b.ravel()[:4]}"
            )

    return check


def ternary(case: TernaryCase) -> Node:
    a, weight, scale = case.inputs()
    packed = ternary_matmul.pack(weight)
    return Node(
        f"ternary/{case.name}",
        ternary_matmul.NAME,
        {"K": case.k, "N": case.n, "spec_version": ternary_matmul.VERSION},
        {"A": a.numpy(), "packed": packed.numpy(), "scale": scale.numpy()},
        (Output("Y", a.numpy().dtype, a.dim()),),
        equal(ternary_matmul.reference(a, packed, scale).numpy()),
        constants=("packed", "scale"),
    )


def int4(case: Int4Case) -> Node:
    a, codes, scale, zero, factor = case.inputs()
    packed = int4_matmul.pack(codes, scale, zero, case.group)
    inputs = {name: tensor.numpy() for name, tensor in packed._asdict().items()}
    return Node(
        f"int4/{case.name}",
        int4_matmul.NAME,
        {"K": case.k, "N": case.n, "group_size": case.group, "spec_version": int4_matmul.VERSION},
        {"A": a.numpy(), **inputs, "factor": factor.numpy()},
        (Output("Y", a.numpy().dtype, a.dim()),),
        equal(int4_matmul.reference(a, packed, factor, case.n, case.group).numpy()),
        constants=(*inputs, "factor"),
    )


def nodes() -> Iterator[Node]:
    """Every case of every op that the library holds."""
    yield from map(ternary, TERNARY_CASES)
    yield from map(int4, INT4_CASES)


def one_of_each() -> list[Node]:
    """A small node of every op, with room for mistakes."""
    return [
        ternary(TernaryCase("small", lead=(2,), k=200, n=5)),
        int4(Int4Case("small", lead=(2,), k=200, n=21, symmetric=False)),
    ]


def large() -> Iterator[Node]:
    """Nodes large enough that threads meet: too slow for an emulator."""
    yield ternary(TernaryCase("large", lead=(64,), k=1024, n=1000))
    yield int4(Int4Case("large", lead=(64,), k=1024, n=1000))
