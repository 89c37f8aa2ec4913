"""Expressions that write the body of an op in ONNX's textual syntax.

    def body(op: Nodes) -> Value:                  # of an op with the input x; `Op.function` calls it
        (x,) = op.inputs
        low, high = op.split(x, -1, 2)
        return op("Concat", high - low, low * 0.5, axis=-1)

As operands, an int is an int64 [1], a sequence of them an int64 [n], a float a float32 []. Equal operators with equal
inputs and attributes are written once. ONNX Runtime inlines every body when it loads the model.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

END = 9223372036854775807  # of a slice: the last


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor in a body."""

    op: Nodes
    name: str

    def __add__(self, other: Operand) -> Value:
        return self.op("Add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.op("Sub", self, other)

    def __mul__(self, other: Operand) -> Value:
        return self.op("Mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self.op("Div", self, other)

    def __matmul__(self, other: Value) -> Value:
        return self.op("MatMul", self, other)

    def cast(self, type: int) -> Value:
        return self.op("Cast", self, to=type)

    def like(self, other: Value) -> Value:
        """Cast to the type of `other`."""
        return self.op("CastLike", self, other)

    def size(self, axis: int) -> Value:
        """int64 [1]: the length of an axis."""
        return self.op("Shape", self, start=axis, end=axis + 1)

    def reshape(self, *dims: Operand) -> Value:
        """-1: the rest, 0: unchanged. A single operand is the whole shape, also of `view` and `expand`."""
        return self.op("Reshape", self, self.op.shape(dims))

    def view(self, *dims: Operand) -> Value:
        """Reshape; a dimension of 0 means 0, not "unchanged"."""
        return self.op("Reshape", self, self.op.shape(dims), allowzero=1)

    def expand(self, *dims: Operand) -> Value:
        return self.op("Expand", self, self.op.shape(dims))

    def transpose(self, *axes: int) -> Value:
        return self.op("Transpose", self, perm=axes)

    def slice(self, begin: Operand, end: Operand, axis: int, step: int | None = None) -> Value:
        return self.op("Slice", self, begin, end, axis, *([] if step is None else [step]))

    def squeeze(self, *axes: int) -> Value:
        return self.op("Squeeze", self, axes)

    def unsqueeze(self, *axes: int) -> Value:
        return self.op("Unsqueeze", self, axes)


class Raw(str):
    """What follows an attribute's name in the text: ": int = @K"."""


Operand: TypeAlias = Value | float | Sequence[int]
Outputs: TypeAlias = Value | Sequence[Value]
Attribute: TypeAlias = float | str | Sequence[float]


class Nodes:
    """The nodes of a function with these inputs and attributes {name: "int" or "float"}."""

    def __init__(self, inputs: Sequence[str], attributes: Mapping[str, str]) -> None:
        self.inputs = [Value(self, name) for name in inputs]
        self._attributes = attributes
        self._lines: list[str] = []  # of the graph that is being written: the function's, or one inside
        self._written: ChainMap[str, list[Value]] = ChainMap()
        self._count = 0

    def function(self, body: Callable[[Nodes], Outputs], outputs: Sequence[str]) -> str:
        """Return the text between the function's head and its end."""
        values = _listed(body(self))
        text = "\n".join(self._lines)
        for value, name in zip(values, outputs, strict=True):
            text = re.sub(rf"\b{value.name}\b", name, text)
        return f"{{\n{text}\n}}\n"

    def __call__(self, op: str, *inputs: Operand | None, **attributes: Attribute) -> Value:
        """Add a node; None omits an input."""
        return self.several(1, op, *inputs, **attributes)[0]

    def several(self, outputs: int, op: str, *inputs: Operand | None, **attributes: Attribute) -> list[Value]:
        """Add a node with several outputs."""
        takes = ", ".join("" if x is None else self._value(x).name for x in inputs)
        settings = ", ".join(key + _setting(value) for key, value in attributes.items())
        text = f"{op} <{settings}> ({takes})" if settings else f"{op} ({takes})"
        if text not in self._written:
            self._written[text] = self._add(outputs, op, text)
        return self._written[text]

    def _add(self, outputs: int, op: str, text: str) -> list[Value]:
        name = f"{op.rpartition('.')[2]}_{self._count}"
        self._count += 1
        values = [Value(self, name if outputs == 1 else f"{name}_{i}") for i in range(outputs)]
        self._lines.append(f"  {_names(values)} = {text}")
        return values

    def _value(self, x: Operand) -> Value:
        if isinstance(x, Value):
            return x
        if isinstance(x, float):
            return self("Constant", value_float=x)
        return self.ints(x) if isinstance(x, int) else self.ints(*x)

    def graph(self, function: Callable[..., Outputs], *inputs: str) -> Raw:
        """Return a graph as an attribute of Loop, Scan or If. inputs: its inputs' types, such as "float[n, c]"."""
        outer = self._lines, self._written
        self._lines, self._written = [], self._written.new_child()
        self._count += 1
        values = [Value(self, f"input_{self._count}_{i}") for i in range(len(inputs))]
        outputs = _listed(function(*values))
        head = ", ".join(f"{type} {value.name}" for type, value in zip(inputs, values, strict=True))
        text = f" = graph ({head}) => ({_names(outputs)}) {{\n" + "\n".join(self._lines) + "\n}"
        self._lines, self._written = outer
        return Raw(text)

    def loop(self, count: Value, start: Value, step: Callable[[Value, Value], Value], type: str) -> Value:
        """Return start after x = step(i, x) for i = 0 .. count - 1; type: of x, such as "float[n, c]"."""
        body = self.graph(lambda i, go, x: (self("Identity", go), step(i, x)), "int64", "bool", type)
        return self("Loop", count, None, start, body=body)

    def unused(self) -> Value:
        """Return an output that no node has, but that the function has to compute."""
        return self._add(1, "Constant", "Constant <value_float = 0.0> ()")[0]

    def attribute(self, name: str) -> Value:
        """Return an attribute of the function as a scalar."""
        return self("Constant", **{f"value_{self._attributes[name]}": self.reference(name)})

    def reference(self, name: str) -> Raw:
        """Return an attribute of the function as one of a node."""
        return Raw(f": {self._attributes[name]} = @{name}")

    def dim(self, name: str) -> Value:
        """int64 [1]: an attribute of the function."""
        return self.attribute(name).reshape(1)

    def scalar(self, value: int) -> Value:
        """int64 []."""
        return self("Constant", value_int=value)

    def number(self, value: float) -> Value:
        """float32 []."""
        return self("Constant", value_float=float(value))

    def numbers(self, *values: float) -> Value:
        """float32 [n]."""
        return self("Constant", value_floats=[float(value) for value in values])

    def ints(self, *values: int) -> Value:
        """int64 [n]."""
        return self("Constant", value_ints=values)

    def shape(self, dims: Sequence[Operand]) -> Value:
        return self._value(dims[0]) if len(dims) == 1 else self("Concat", *dims, axis=0)

    def split(self, x: Value, axis: int, parts: int | Sequence[Operand]) -> list[Value]:
        """Split x into equal parts, or into parts of these lengths."""
        if isinstance(parts, int):
            return self.several(parts, "Split", x, axis=axis, num_outputs=parts)
        return self.several(len(parts), "Split", x, self.shape(parts), axis=axis)


def _listed(outputs: Outputs) -> Sequence[Value]:
    return [outputs] if isinstance(outputs, Value) else outputs


def _names(values: Sequence[Value]) -> str:
    return ", ".join(value.name for value in values)


def _setting(value: Attribute) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, str):
        return f' = "{value}"'
    return f" = {list(value) if isinstance(value, Sequence) else value}"
