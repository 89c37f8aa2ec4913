"""Nodes that are wrong in one thing, and the sentence that must come back. A new op joins in broken()."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..ops.cases import TernaryCase
from .nodes import Node, ternary


@dataclass(frozen=True)
class Broken:
    """`sentence` is a pattern; None where ONNX Runtime itself refuses the model."""

    node: Node
    sentence: str | None


def changed(node: Node, name: str, **changes: Any) -> Node:
    """The node with other attributes (None: taken away) or inputs."""
    attributes = {k: v for k, v in (node.attributes | changes).items() if k in node.attributes and v is not None}
    inputs = {k: changes.get(k, v) for k, v in node.inputs.items()}
    assert not set(changes) - set(node.attributes) - set(node.inputs)
    return replace(node, name=f"{node.op}/{name}", attributes=attributes, inputs=inputs, constants=())


def of_any_op(node: Node, optional: tuple[str, ...] = ()) -> Iterator[Broken]:
    """What can be wrong with a node of any op."""
    for name, value in node.attributes.items():
        kind, other = ("integer", float(value)) if isinstance(value, int) else ("float", 1)
        yield Broken(changed(node, f"no_{name}", **{name: None}), f"{node.op} has no {kind} attribute {name}")
        yield Broken(changed(node, f"{name}_of_another_kind", **{name: other}), f"has no {kind} attribute {name}")
    yield Broken(changed(node, "newer", spec_version=2), "spec_version is 2, this library computes 1")
    for name, array in node.inputs.items():
        if array is None or name in optional:
            continue
        yield Broken(changed(node, f"{name}_omitted", **{name: None}), None)
        yield Broken(changed(node, f"{name}_float64", **{name: array.astype(np.float64)}), None)
        deep = array.reshape(array.shape + (1,) * (9 - array.ndim))
        yield Broken(changed(node, f"{name}_of_rank_9", **{name: deep}), "has 9 dimensions, wanted at most 8")


def misshapen(node: Node) -> Iterator[Node]:
    """The node with one input a little too large or small, or empty. Some of these are legal."""
    for name, array in node.inputs.items():
        if array is None:
            continue
        for axis, size in enumerate(array.shape):
            for other in {0, size - 1, size + 1, 2 * size, 1} - {size}:
                new = np.zeros((*array.shape[:axis], other, *array.shape[axis + 1 :]), array.dtype)
                yield changed(node, f"{name}_{axis}_is_{other}", **{name: new})
        yield changed(node, f"{name}_is_a_number", **{name: np.zeros((), array.dtype)})
        yield changed(node, f"{name}_is_flat", **{name: array.reshape(-1)})
        yield changed(node, f"{name}_is_deeper", **{name: array[None]})


def broken_ternary() -> Iterator[Broken]:
    node = ternary(TernaryCase("base", lead=(2,), k=200, n=5))
    a, packed = node.inputs["A"], node.inputs["packed"]
    assert a is not None and packed is not None
    yield from of_any_op(node)
    for name, sentence, changes in (
        ("k_0", "attribute K is 0, wanted 1 to", {"K": 0}),
        ("k_negative", "attribute K is -200, wanted 1 to", {"K": -200}),
        ("k_huge", "attribute K is 4611686018427387904, wanted", {"K": 1 << 62}),
        ("n_0", "attribute N is 0, wanted 1 to", {"N": 0}),
        ("n_huge", r"packed is \[5, 64\], wanted \[2147483648, 64\]", {"N": 1 << 31}),
        ("n_6", r"packed is \[5, 64\], wanted \[6, 64\]", {"N": 6}),
        ("k_201", r"A is \[2, 200\], wanted \[..., 201\]", {"K": 201}),
        ("k_257", r"A is \[2, 200\], wanted \[..., 257\]", {"K": 257}),
        ("a_a_number", r"A is \[\], wanted \[..., 200\]", {"A": np.zeros((), np.float32)}),
        ("a_transposed", r"A is \[200, 2\], wanted", {"A": a.T}),
        ("packed_flat", r"packed is \[320\], wanted \[5, 64\]", {"packed": packed.reshape(-1)}),
        ("packed_short", r"packed is \[5, 63\], wanted \[5, 64\]", {"packed": packed[:, :63]}),
        ("packed_empty", r"packed is \[0, 64\], wanted \[5, 64\]", {"packed": packed[:0]}),
        ("scale_of_rows", r"scale is \[5\], wanted \[1\]", {"scale": np.ones(5, np.float32)}),
        ("scale_empty", r"scale is \[0\], wanted \[1\]", {"scale": np.ones(0, np.float32)}),
    ):
        yield Broken(changed(node, name, **changes), sentence)


def broken() -> Iterator[Broken]:
    """Every op's."""
    yield from broken_ternary()
