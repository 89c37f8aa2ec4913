"""Expressions that generate the text of an op's body in ONNX's textual syntax.

    b = Body()
    low, high = b.split(b.input("x"), -1, 2)
    b("Concat", high - low, low, axis=-1, name="y")
    str(b)            # the lines between the braces of a function whose input is x and whose output is y

Equal operators with equal inputs and attributes are written once. ONNX Runtime inlines every body when it loads the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AttributeValue = int | float | str | list[int]


@dataclass(frozen=True)
class Value:
    """A tensor in a body."""

    body: Body
    name: str

    def __add__(self, other: Value) -> Value:
        return self.body("Add", self, other)

    def __sub__(self, other: Value) -> Value:
        return self.body("Sub", self, other)

    def __mul__(self, other: Value) -> Value:
        return self.body("Mul", self, other)

    def __truediv__(self, other: Value) -> Value:
        return self.body("Div", self, other)

    def __matmul__(self, other: Value) -> Value:
        return self.body("MatMul", self, other)


class Body:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._written: dict[str, list[Value]] = {}

    def __str__(self) -> str:
        return "{\n" + "\n".join(self._lines) + "\n}\n"

    def __call__(self, op: str, *inputs: Value, name: str = "", **attributes: AttributeValue) -> Value:
        """Add a node; `name`: of its output, if it is an output of the function."""
        return self._node(op, _settings(attributes), inputs, 1, name)[0]

    def _node(self, op: str, settings: str, inputs: tuple[Value, ...], outputs: int = 1, name: str = "") -> list[Value]:
        takes = ", ".join(value.name for value in inputs)
        text = f"{op} <{settings}> ({takes})" if settings else f"{op} ({takes})"
        if text not in self._written or name:
            first = len(self._lines)
            names = [name or f"{op}_{first}"] if outputs == 1 else [f"{op}_{first}_{i}" for i in range(outputs)]
            self._lines.append(f"  {', '.join(names)} = {text}")
            self._written[text] = [Value(self, made) for made in names]
        return self._written[text]

    def split(self, x: Value, axis: int, parts: int | list[Value]) -> list[Value]:
        """Split x into equal parts, or into parts of these lengths."""
        if isinstance(parts, int):
            return self._node("Split", _settings({"axis": axis, "num_outputs": parts}), (x,), parts)
        return self._node("Split", _settings({"axis": axis}), (x, self.dims(*parts)), len(parts))

    def input(self, name: str) -> Value:
        """Return an input of the function."""
        return Value(self, name)

    def attribute(self, name: str, type: str = "int") -> Value:
        """Return an attribute of the function as a scalar; type: "int" or "float"."""
        return self._node("Constant", f"value_{type}: {type} = @{name}", ())[0]

    def ints(self, *values: int) -> Value:
        """int64 [n]."""
        return self("Constant", value_ints=list(values))

    def number(self, value: float) -> Value:
        """float32 []."""
        return self("Constant", value_float=float(value))

    def cast(self, x: Value, type: int) -> Value:
        return self("Cast", x, to=type)

    def size(self, x: Value, axis: int) -> Value:
        """int64 [1]: the length of an axis."""
        return self("Shape", x, start=axis, end=axis + 1)

    def dims(self, *dims: Value) -> Value:
        return self("Concat", *dims, axis=0)

    def view(self, x: Value, *dims: Value) -> Value:
        """Reshape x; a dimension of 0 means 0, not "unchanged"."""
        return self("Reshape", x, self.dims(*dims), allowzero=1)

    def slice(self, x: Value, begin: Value, end: Value, axis: int) -> Value:
        return self("Slice", x, begin, end, self.ints(axis))


def _settings(attributes: Mapping[str, AttributeValue]) -> str:
    texts = {key: f'"{value}"' if isinstance(value, str) else str(value) for key, value in attributes.items()}
    return ", ".join(f"{key} = {text}" for key, text in texts.items())
