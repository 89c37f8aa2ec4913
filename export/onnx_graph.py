"""A small builder of ONNX graphs that writes weights directly to the file `model.onnx.data`, and to `model.onnx.data_1`
and so on where it would be larger than a browser can load.

    g = OnnxGraph(folder, "fp32")
    x = g.input("x", np.int64, ["batch_size", "sequence"])
    with g.scope("layers.0"):
        y = g.op("Gather", [g.initializer("embedding", table), x])
    g.output("y", y, np.float32, ["batch_size", "sequence", 64])
    g.save()

Each weight is written at once and not kept, so the memory needed is that of the largest weight. Constants (shapes,
axes, small tables of numbers) stay in model.onnx, where ONNX Runtime can fold them.

IR version 10 and opset 21 are what the oldest ONNX Runtime that diffbit supports can read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor, nn

from ..formats import QTensor, QuantLinear
from ..formats.base import MICROSOFT
from ..io.errors import DiffbitError
from ..models.graph import Attribute
from ..models.layers.norm import LayerNorm, RMSNorm
from ..ops import float_matmul
from ..ops.signature import DOMAIN, DOMAIN_VERSION
from ..runtime.artifact import FILE_BYTES

MODEL = "model.onnx"
DATA = "model.onnx.data"
TRANSFORMERS_JS_DATA = "model.onnx_data"  # the only name that transformers.js looks for; more files end in _1, _2, ...
IR_VERSION = 10
OPSETS = {"": 21, MICROSOFT: 1}
FLOATS: dict[str, type[np.floating]] = {"fp32": np.float32, "fp16": np.float16}

# ONNX Runtime maps a weight into memory, without a copy, where its offset is a multiple of the page size
PAGE, SMALL = 4096, 1 << 20


class OnnxGraph:
    """A graph under construction. `dtype` is the type of its floating-point weights and activations.

    target: "cpu", "cuda" or "webgpu". On CPUs, ONNX Runtime has no float16 product and makes float32 copies at load, so
    diffbit's FloatMatMul is used, which reads the weights in place. On GPUs, ONNX Runtime's MatMul is used.
    """

    def __init__(self, folder: Path, dtype: str, target: str = "cpu", data: str = DATA) -> None:
        self.folder = folder
        self.files = [data]  # of weights; the last one is being written
        self.optional_inputs: list[str] = []
        self.dtype = FLOATS[dtype]
        self._in_place = self.dtype is np.float16 and target == "cpu"
        self._graph = ir.Graph([], [], nodes=[], opset_imports=dict(OPSETS), name="diffbit")
        self._body = self._graph  # the graph that nodes are added to: this one, or the body of a loop
        self._functions: dict[tuple[str, Hashable], ir.Function] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._scope = ""  # prefix of names
        self._nodes = 0
        self._data = open(folder / data, "wb")  # noqa: SIM115 (closed by `save`; the folder vanishes on failure)

    @contextmanager
    def scope(self, name: str | None) -> Iterator[None]:
        """Prefix the names of nodes and weights made inside with `name` and a dot; None: no prefix."""
        outer = self._scope
        self._scope = "" if name is None else f"{outer}{name}."
        try:
            yield
        finally:
            self._scope = outer

    def _name(self, name: str) -> str:
        return self._scope + name

    def input(self, name: str, dtype: DTypeLike, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=_type(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value

    def optional_input(self, name: str, default: NDArray[Any]) -> ir.Value:
        """Add an initializer that a loader may turn into an input (runtime/external.py), listed in `optional_inputs`.
        As an input with a default, it would make every other loader print a warning."""
        self.optional_inputs.append(name)
        return self._register(ir.Value(name=name, const_value=ir.tensor(default, name=name)))

    def output(self, name: str, value: ir.Value, dtype: DTypeLike, shape: Sequence[int | str]) -> None:
        value.name, value.type, value.shape = name, _type(dtype), ir.Shape(shape)
        self._graph.outputs.append(value)

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], *, domain: str = "", **attributes: Attribute
    ) -> ir.Value:
        """Add a node with one output; None omits an input."""
        (output,) = self.ops(op_type, inputs, 1, domain=domain, **attributes)
        return output

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        *,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        node = ir.node(
            op_type,
            inputs,
            attributes,
            domain=domain,
            num_outputs=outputs,
            name=self._name(f"{op_type}_{self._nodes}"),
        )
        return self._add(node)

    def _add(self, node: ir.Node) -> Sequence[ir.Value]:
        self._nodes += 1
        if self._body is not self._graph:  # names of a body and of the graph around it must differ
            for index, output in enumerate(node.outputs):
                output.name = f"{node.name}_{index}"
        self._body.append(node)
        return node.outputs

    def scan(
        self, step: Callable[..., Sequence[ir.Value]], states: Sequence[ir.Value], rows: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """Add a loop over axis 1 of `rows`, float32; see models/graph.py."""
        name = self._name(f"Scan_{self._nodes}")
        values = [ir.Value(name=f"{name}_{i}", type=_type(np.float32)) for i in range(len(states) + len(rows))]
        outer, self._body = self._body, ir.Graph(values, [], nodes=[], name=name)
        results = step(*values)
        body, self._body = self._body, outer
        body.outputs.extend(results)
        for result in results:
            result.type = _type(np.float32)
        axes = {"scan_input_axes": [1] * len(rows), "scan_output_axes": [1] * (len(results) - len(states))}
        attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(rows), **axes}
        return self._add(ir.node("Scan", [*states, *rows], attributes, num_outputs=len(results), name=name))

    def custom(
        self,
        op: ModuleType,
        inputs: Sequence[ir.Value | None],
        **attributes: Attribute,
    ) -> ir.Value:
        """Add a node with one output of one of diffbit's own ops (a module of ops/), and its body."""
        (output,) = self.customs(op, inputs, 1, lambda name: op.function(), **attributes)
        return output

    def customs(
        self,
        op: ModuleType,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        body: Callable[[str], ir.Function],
        variant: Hashable = None,
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a node of one of diffbit's own ops with several outputs. The op's nodes with equal `variant` share a name
        and a body, which `body` makes."""
        key = op.OP.name, variant
        if key not in self._functions:
            count = sum(name == op.OP.name for name, _ in self._functions)
            if count == op.OP.names:
                raise DiffbitError(
                    f"the layers need {op.OP.name} with more than {op.OP.names} different signatures (branches, "
                    "windows, noise ratios), which an artifact cannot hold"
                )
            self._functions[key] = body(op.OP.named(count))
            self._graph.opset_imports[DOMAIN] = DOMAIN_VERSION
        name = self._functions[key].name
        return self.ops(name, inputs, outputs, domain=DOMAIN, **op.OP.attributes_of(attributes))

    def const(self, values: ArrayLike, dtype: DTypeLike = np.int64) -> ir.Value:
        """Add a constant inside model.onnx; equal ones are shared."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self._register(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
        return self._constants[key]

    def initializer(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Add a weight and write it to a file now, in the dtype of `array`, not of the graph."""
        name = self._name(name)
        array = np.ascontiguousarray(array)
        alignment = PAGE if array.nbytes >= SMALL else 64
        offset = -(-self._data.tell() // alignment) * alignment
        if offset and offset + array.nbytes > FILE_BYTES:
            self._data.close()
            self.files.append(f"{self.files[0]}_{len(self.files)}")
            self._data, offset = open(self.folder / self.files[-1], "wb"), 0  # noqa: SIM115
        self._data.seek(offset)
        self._data.write(array.reshape(-1).view(np.uint8).data)  # as uint8: bfloat16 arrays have no buffer
        tensor = ir.ExternalTensor(
            self.files[-1],
            offset,
            array.nbytes,
            ir.DataType.from_numpy(array.dtype),
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=self.folder,
        )
        return self._register(ir.Value(name=name, const_value=tensor))

    def weight(self, name: str, array: NDArray[np.floating], dtype: type[np.floating] | None = None) -> ir.Value:
        """Add a float weight in the graph's dtype or `dtype`; raises DiffbitError if it does not fit."""
        with np.errstate(over="ignore"):
            cast = np.asarray(array, dtype or self.dtype)
        if not np.isfinite(cast).all():
            if not np.isfinite(array).all():
                raise DiffbitError(
                    f"{self._name(name)}: is NaN or infinite when computed from the checkpoint's weights, because they "
                    "hold extreme values"
                )
            raise DiffbitError(
                f"{self._name(name)}: holds {np.abs(array).max():.4g}, more than fp16's largest number, 65504; "
                "export with --dtype fp32"
            )
        return self.initializer(name, cast)

    def _register(self, value: ir.Value) -> ir.Value:
        tensor = value.const_value
        assert tensor is not None
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        self._graph.register_initializer(value)
        return value

    def cast(self, x: ir.Value, dtype: DTypeLike) -> ir.Value:
        return self.op("Cast", [x], to=int(ir.DataType.from_numpy(np.dtype(dtype))))

    def linear(self, x: ir.Value, module: nn.Module, name: str, scale: float = 1.0, bias: bool = True) -> ir.Value:
        """Add scale * (x W^T) + bias: a float product, or the operator of a quantized weight's format
        (formats/)."""
        with self.scope(name):
            if isinstance(module, QuantLinear):
                product = self.low_bit_product(x, module, scale)
            else:
                assert isinstance(module, nn.Linear)
                weight = module.weight.detach().float() * scale
                if self._in_place:
                    product = self.custom(float_matmul, [x, self.weight("weight", weight.numpy())])
                else:
                    product = self.op("MatMul", [x, self.weight("weight", weight.T.contiguous().numpy())])
            if module.bias is None or not bias:
                return product
            return self.op("Add", [product, self.weight("bias", module.bias.detach().float().numpy())])

    def low_bit_product(self, x: ir.Value, module: QuantLinear, factor: float) -> ir.Value:
        """Add the operator of a quantized weight's format, without a bias."""
        return module.onnx(self, x, factor)

    def linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> Sequence[ir.Value]:
        """Add several linear layers {name: module} with the same input x: one product and a Split, if they can be."""
        product = self.stacked_linears(x, modules)
        if product is None:
            return [self.linear(x, module, name) for name, module in modules.items()]
        sizes = [module.out_features for module in modules.values() if isinstance(module, nn.Linear | QuantLinear)]
        return self.ops("Split", [product, self.const(sizes)], len(sizes), axis=-1)

    def stacked_linears(self, x: ir.Value, modules: Mapping[str, nn.Module]) -> ir.Value | None:
        """Add `linears` as one product, named after all of them (parts.py); None if their weights cannot be
        concatenated."""
        stacked = _stacked([module for module in modules.values() if isinstance(module, nn.Linear | QuantLinear)])
        return None if stacked is None else self.linear(x, stacked, "+".join(modules))

    def norm(self, x: ir.Value, module: nn.Module, name: str, dtype: type[np.floating] | None = None) -> ir.Value:
        """Add a norm of x, which has the graph's dtype or `dtype`; returns x for an nn.Identity."""
        if not isinstance(module, RMSNorm | LayerNorm):
            return x
        # its kernels square and sum in float32 for any dtype, so large fp16 activations do not overflow
        op_type = "LayerNormalization" if isinstance(module, LayerNorm) else "SimplifiedLayerNormalization"
        weights = self._norm_weights(module, name, dtype)
        return self.op(op_type, [x, *weights], axis=-1, epsilon=module.eps, stash_type=1)

    def add_norm(self, x: ir.Value, more: ir.Value, module: nn.Module, name: str) -> tuple[ir.Value, ir.Value]:
        """Add a node that returns x + more, and that sum through a norm."""
        assert isinstance(module, RMSNorm | LayerNorm)
        op_type = "SkipLayerNormalization" if isinstance(module, LayerNorm) else "SkipSimplifiedLayerNormalization"
        weights = self._norm_weights(module, name)
        normed, mean, deviation, total = self.ops(op_type, [x, more, *weights], 4, domain=MICROSOFT, epsilon=module.eps)
        mean.name = deviation.name = ""  # omits these outputs
        return total, normed

    def _norm_weights(
        self, module: RMSNorm | LayerNorm, name: str, dtype: type[np.floating] | None = None
    ) -> list[ir.Value]:
        """Add a norm's weight and, for a LayerNorm, its bias."""
        parts = module.named_parameters()
        return [self.weight(f"{name}.{part}", value.detach().float().numpy(), dtype) for part, value in parts]

    def save(self) -> None:
        """Write model.onnx beside its data."""
        self._data.close()
        model = ir.Model(
            self._graph,
            ir_version=IR_VERSION,
            producer_name="diffbit",
            functions=list(self._functions.values()),
        )
        ir.save(model, self.folder / MODEL)


def _stacked(modules: Sequence[nn.Linear | QuantLinear]) -> nn.Module | None:
    """Concatenate the rows of linear layers with the same input; None if their weights differ in format."""
    quantized = [module for module in modules if isinstance(module, QuantLinear)]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    if len(biases) not in (0, len(modules)) or len(quantized) not in (0, len(modules)):
        return None
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    if not quantized:
        stacked = nn.Linear(linears[0].in_features, 1, device="meta")
        stacked.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
        stacked.register_parameter("bias", bias)
        return stacked
    first = quantized[0]
    if any((layer.weight.format, layer.rounding) != (first.weight.format, first.rounding) for layer in quantized):
        return None
    return QuantLinear(QTensor.stack([layer.weight for layer in quantized]), first.rounding, bias)


def _type(dtype: DTypeLike) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
