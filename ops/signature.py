"""The parts of an op's signature: tensors and their types, attributes, the struct of its CUDA call."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ..io.errors import DiffbitError

if TYPE_CHECKING:
    import onnx_ir

DOMAIN = "diffbit"
DOMAIN_VERSION = 1


class Type(enum.IntEnum):
    """Element types of tensors, as ONNX numbers them."""

    FLOAT32 = 1
    UINT8 = 2
    INT8 = 3
    INT64 = 7
    FLOAT16 = 10
    BFLOAT16 = 16


@dataclass(frozen=True)
class Variable:
    """A type variable, which may be one of several types; it is the same wherever its name occurs in an op."""

    name: str
    types: tuple[Type, ...]
    on_gpu: tuple[Type, ...]  # the types on a GPU, which supports more

    def where(self, found: Mapping[Variable, Type]) -> Type:
        return found[self]


@dataclass(frozen=True)
class ScaleOf:
    """The type of a cache's scales: float16 for packed codes."""

    cache: Variable

    def where(self, found: Mapping[Variable, Type]) -> Type:
        return Type.FLOAT16 if found[self.cache] == Type.UINT8 else Type.FLOAT32


@dataclass(frozen=True)
class Tensor:
    name: str
    type: Type | Variable | ScaleOf
    optional: bool = False
    on_host: bool = False  # read by the CPU even if the op runs on a GPU


@dataclass(frozen=True)
class Integer:
    """An attribute in low..high, or one of `choices`. Without a default, every node must set it."""

    name: str
    low: int = 0
    high: int = 0
    choices: tuple[int, ...] = ()
    default: int | None = None

    def check(self, op: str, value: object) -> None:
        if type(value) is not int or value not in (self.choices or range(self.low, self.high + 1)):
            wanted = listed(self.choices) if self.choices else f"{self.low} to {self.high}"
            raise DiffbitError(f"{op}: {self.name} is {value!r}, wanted {wanted}")


@dataclass(frozen=True)
class Number:
    """A float attribute."""

    name: str
    default: float | None = None

    def check(self, op: str, value: object) -> None:
        if not isinstance(value, float | int):
            raise DiffbitError(f"{op}: {self.name} is {value!r}, wanted a number")


@dataclass(frozen=True)
class Call:
    """The struct of an op's CUDA call, csrc/cuda/api.h: pointers to its tensors, except those that the CPU reads, in
    order and in lower case, then int64 fields, then float fields; `notes` describes fields."""

    struct: str  # without its "Diffbit"
    function: str  # without its "diffbit_cuda_"
    integers: tuple[str, ...]
    floats: tuple[str, ...] = ()
    notes: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Op:
    name: str
    version: int  # of definition and layout; a kernel compares it with a node's attribute spec_version
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Integer | Number, ...]
    call: Call
    opsets: tuple[tuple[str, int], ...] = (("", 21),)
    names: int = 1  # how many names the op has: a function has one body, and a model may need several (`named`)

    def named(self, index: int) -> str:
        """Return the op's name for a model's first, second, ... body: X, X_2, ... (ONNX has function overloads for
        this, but ONNX Runtime 1.23 silently uses the last one for all.)"""
        return self.name if index == 0 else f"{self.name}_{index + 1}"

    def function(
        self,
        body: str,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        name: str | None = None,
    ) -> onnx_ir.Function:
        """Return a body as an ONNX model-local function, which runs if no native library is registered. `inputs`,
        `outputs`: the declared names, by default all. name: one of the op's names."""
        import onnx.parser
        from onnx_ir import serde

        imports = ", ".join(f'"{domain}" : {version}' for domain, version in self.opsets)
        attributes = ", ".join([*(attribute.name for attribute in self.attributes), "spec_version"])
        takes = ", ".join(inputs or [tensor.name for tensor in self.inputs])
        gives = ", ".join(outputs or [tensor.name for tensor in self.outputs])
        head = f'<domain: "{DOMAIN}", opset_import: [{imports}]>\n'
        head += f"{name or self.name} <{attributes}> ({takes}) => ({gives})\n"
        return serde.deserialize_function(onnx.parser.parse_function(head + body))

    def attributes_of(self, given: Mapping[str, int | float]) -> dict[str, int | float]:
        """Return a node's attributes: those `given`, defaults for the others, and spec_version. Raises DiffbitError for
        one that is unknown, missing or invalid."""
        attributes = {attribute.name: attribute for attribute in self.attributes}
        for name in given:
            if name not in attributes:
                raise DiffbitError(f"{self.name} has no attribute {name}, wanted {listed(tuple(attributes))}")
        found: dict[str, int | float] = {}
        for name, attribute in attributes.items():
            value = given.get(name, attribute.default)
            if value is None:
                raise DiffbitError(f"{self.name}: attribute {name} is missing")
            attribute.check(self.name, value)
            found[name] = value
        return found | {"spec_version": self.version}

    def types(self, gpu: bool = False) -> list[list[Type]]:
        """Return the types of inputs and outputs for every combination of the variables on a CPU or a GPU."""
        types = [tensor.type for tensor in self.inputs + self.outputs]
        of_types = [type.cache if isinstance(type, ScaleOf) else type for type in types]
        variables = list(dict.fromkeys(type for type in of_types if isinstance(type, Variable)))
        rows = []
        for chosen in product(*(variable.on_gpu if gpu else variable.types for variable in variables)):
            found = dict(zip(variables, chosen, strict=True))
            rows.append([type if isinstance(type, Type) else type.where(found) for type in types])
        return rows

    def fields(self) -> list[tuple[str, str]]:
        """Return (C type, name) of the fields of the CUDA call's struct."""
        pointers = [("const void*", tensor.name.lower()) for tensor in self.inputs if not tensor.on_host]
        pointers += [("void*", tensor.name.lower()) for tensor in self.outputs]
        integers = [("int64_t", name) for name in self.call.integers]
        return [*pointers, *integers, *(("float", name) for name in self.call.floats)]


def listed(values: Sequence[object]) -> str:
    """Format a list, such as "16, 8, 4 or 2"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
