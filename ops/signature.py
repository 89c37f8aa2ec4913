"""The parts of an op's signature: tensors and their types, attributes, the struct of its CUDA call."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from ..io.errors import DiffbitError
from .body import Nodes, Outputs

if TYPE_CHECKING:
    import onnx_ir

DOMAIN = "diffbit"
DOMAIN_VERSION = 1


class Type(enum.IntEnum):
    """Element types of tensors, as ONNX numbers them."""

    FLOAT32 = 1
    UINT8 = 2
    INT8 = 3
    INT32 = 6
    INT64 = 7
    BOOL = 9
    FLOAT16 = 10
    FLOAT64 = 11
    BFLOAT16 = 16


@dataclass(frozen=True)
class Variable:
    """A type variable, which may be one of several types; it is the same wherever its name occurs in an op."""

    name: str
    types: tuple[Type, ...]
    on_gpu: tuple[Type, ...]  # the types on a GPU, which supports more


@dataclass(frozen=True)
class Tensor:
    name: str
    type: Type | Variable
    optional: bool = False
    on_host: bool = False  # read by the CPU even if the op runs on a GPU


@dataclass(frozen=True)
class Integer:
    """An attribute in low..high, or one of `choices`. Without a default, every node must set it."""

    type: ClassVar = "int"
    name: str
    low: int = 0
    high: int = 0
    choices: tuple[int, ...] = ()
    default: int | None = None

    def check(self, op: str, value: object) -> None:
        if type(value) is not int or value not in (self.choices or range(self.low, self.high + 1)):
            allowed = listed(self.choices) if self.choices else f"{self.low} to {self.high}"
            raise DiffbitError(f"{op}: {self.name} is {value!r}, wanted {allowed}")


@dataclass(frozen=True)
class Number:
    """A float attribute."""

    type: ClassVar = "float"
    name: str
    default: float | None = None

    def check(self, op: str, value: object) -> None:
        if not isinstance(value, float | int):
            raise DiffbitError(f"{op}: {self.name} is {value!r}, wanted a number")


@dataclass(frozen=True)
class Call:
    """The struct of an op's CUDA call, csrc/cuda/api.h: pointers to its tensors, except those that the CPU reads, in
    order and in lower case, then int64 fields, then float fields.

    integers, floats: "name = expression" in C++, with the `node` and its checked `tensors` (csrc/ort/nodes.h); without
    "name = " the name is the expression's last word. tensors: paths in `tensors` of those that have other names there.
    notes: comments.
    """

    function: str  # without its "diffbit_cuda_"
    integers: tuple[str, ...]
    floats: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    name: str
    version: int  # of definition and layout; a kernel compares it with a node's attribute spec_version
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    call: Call
    attributes: tuple[Integer | Number, ...] = ()
    opsets: tuple[tuple[str, int], ...] = (("", 21),)
    names: int = 1  # how many names the op has: a function has one body, and a model may need several (`named`)

    def named(self, index: int) -> str:
        """Return the op's name for a model's first, second, ... body: X, X_2, ... (ONNX has function overloads for
        this, but ONNX Runtime 1.23 silently uses the last one for all.)"""
        return self.name if index == 0 else f"{self.name}_{index + 1}"

    def function(
        self,
        body: Callable[[Nodes], Outputs],
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        name: str | None = None,
    ) -> onnx_ir.Function:
        """Return a body as an ONNX model-local function, which runs if no native library is registered. `inputs`,
        `outputs`: the declared names, by default all. name: one of the op's names."""
        import onnx.parser
        from onnx_ir import serde

        inputs = inputs or [tensor.name for tensor in self.inputs]
        outputs = outputs or [tensor.name for tensor in self.outputs]
        imports = ", ".join(f'"{domain}" : {version}' for domain, version in self.opsets)
        types = {attribute.name: attribute.type for attribute in self.attributes} | {"spec_version": "int"}
        head = f'<domain: "{DOMAIN}", opset_import: [{imports}]>\n'
        head += f"{name or self.name} <{', '.join(types)}> ({', '.join(inputs)}) => ({', '.join(outputs)})\n"
        return serde.deserialize_function(
            onnx.parser.parse_function(head + Nodes(inputs, types).function(body, outputs))
        )

    def attributes_of(self, settings: Mapping[str, int | float]) -> dict[str, int | float]:
        """Return a node's attributes: `settings`, defaults for the others, and spec_version. Raises DiffbitError for
        one that is unknown, missing or invalid."""
        attributes = {attribute.name: attribute for attribute in self.attributes}
        for name in settings:
            if name not in attributes:
                raise DiffbitError(f"{self.name} has no attribute {name}, wanted {listed(tuple(attributes))}")
        values: dict[str, int | float] = {}
        for name, attribute in attributes.items():
            value = settings.get(name, attribute.default)
            if value is None:
                raise DiffbitError(f"{self.name}: attribute {name} is missing")
            attribute.check(self.name, value)
            values[name] = value
        return values | {"spec_version": self.version}

    def types(self, gpu: bool = False) -> list[list[Type]]:
        """Return the types of inputs and outputs for every combination of the variables on a CPU or a GPU."""
        types = [tensor.type for tensor in self.inputs + self.outputs]
        variables = list(dict.fromkeys(type for type in types if isinstance(type, Variable)))
        rows = []
        for chosen in product(*(variable.on_gpu if gpu else variable.types for variable in variables)):
            types_of: dict[object, Type] = dict(zip(variables, chosen, strict=True))
            rows.append([type if isinstance(type, Type) else types_of[type] for type in types])
        return rows

    def fields(self) -> list[tuple[str, str, str]]:
        """Return (C type, name, C++ expression) of the fields of the CUDA call's struct."""
        call = self.call
        inputs = [("const void*", tensor.name.lower()) for tensor in self.inputs if not tensor.on_host]
        pointers = inputs + [("void*", tensor.name.lower()) for tensor in self.outputs]
        fields = [(kind, name, f"tensors.{call.tensors.get(name, name)}.data") for kind, name in pointers]
        for kind, texts in (("int64_t", call.integers), ("float", call.floats)):
            for text in texts:
                name, _, source = text.rpartition(" = ")
                fields.append((kind, name or source.rpartition(".")[2], source))
        return fields


def listed(values: Sequence[object], word: str = "or") -> str:
    """Format a list, such as "16, 8, 4 or 2"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} {word} {last}" if first else last
