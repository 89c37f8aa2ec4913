"""What happens inside an artifact: its ternary layers' inputs, integers, steps and outputs, in a run of its graph.

    calls = ternary_calls(artifact, ids, isa="avx2")        # by module: "layers.0.self_attn.o_proj" -> Call
    calls = ternary_calls(artifact, ids)                    # the bodies, which show what they compute

Of a body, everything is an output of the graph, once the functions are written out in it. A kernel gives its product
only, so what it does to its input is seen through weights that show it: `through_a_kernel`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, inliner

from diffbit.ops import hadamard, ternary_matmul
from diffbit.runtime import native

from ..ops.onnx_run import body_of, run_node


@dataclass(frozen=True)
class Call:
    """A ternary layer in one run, [B, S, ...]."""

    attributes: dict[str, int]
    x: np.ndarray  # fp32 [..., K], what the layer is given
    spread: np.ndarray  # fp32 [..., K], x after its Hadamard transform; x where there is none
    packed: np.ndarray  # uint8 [N, 32*ceil(K/128)]
    scale: np.ndarray  # fp32 [1]
    y: np.ndarray  # fp32 [..., N]
    q: np.ndarray | None = None  # integers [..., K]; the body's, as are the following
    a: np.ndarray | None = None  # fp32 [..., 1]
    sums: np.ndarray | None = None  # int32 [..., N]
    weight: np.ndarray | None = None  # int8 [K, N]


def ternary_calls(artifact: Path, ids: np.ndarray, isa: str | None = None) -> dict[str, Call]:
    """Run the graph on `ids` [B, S] and an empty cache: on the library's kernels, or on the bodies if isa is None."""
    model = onnx.load(artifact / "model.onnx")
    name_of: dict[tuple[str, str], str] = {}  # (module, field of Call) -> value
    attributes: dict[str, dict[str, int]] = {}
    makers = _makers(model.graph)
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in model.graph.initializer}
    splits = [node for node in model.graph.node if node.op_type == "Split" and len(node.input) == 2]
    sizes = {node.input[0]: constants[node.input[1]] for node in splits}
    gated = {node.input[0] for node in model.graph.node if node.op_type == "SiluGate"}
    for node in model.graph.node:
        if node.op_type != ternary_matmul.OP.name:
            continue
        module = node.name.rpartition(".")[0]
        attributes[module] = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        before = makers.get(node.input[0])
        spread = before is not None and before.op_type == hadamard.OP.name
        names = (before.input[0] if spread else node.input[0], *node.input, node.output[0])
        for field, name in zip(("x", "spread", "packed", "scale", "y"), names, strict=True):
            name_of[module, field] = name
    if isa is None:
        model = inliner.inline_local_functions(model)
        makers = _makers(model.graph)
        for module in attributes:
            product = makers[makers[name_of[module, "y"]].input[0]]  # stepped * scale, below the cast to A's type
            stepped = makers[product.input[0]]  # sums * a
            matmul = makers[makers[stepped.input[0]].input[0]]
            assert (product.op_type, stepped.op_type, matmul.op_type) == ("Mul", "Mul", "MatMulInteger")
            name_of[module, "q"], name_of[module, "weight"] = matmul.input[:2]
            name_of[module, "sums"], name_of[module, "a"] = matmul.output[0], stepped.input[1]
    arrays = _run(model, ids, set(name_of.values()), isa)
    fields = {key: arrays[name] for key, name in name_of.items()}
    calls: dict[str, Call] = {}
    for module, numbers in attributes.items():
        of_module = {field: value for (name, field), value in fields.items() if name == module}
        if isa is None:
            of_module["q"] = of_module["q"].astype(np.int64) - 128  # the body holds them as uint8
        halves = [numbers["N"] // 2] * 2 if name_of[module, "y"] in gated else [numbers["N"]]
        rows = sizes.get(name_of[module, "y"], halves)
        calls.update(_each(module, Call(numbers, **of_module), rows))
    return calls


def _each(names: str, call: Call, sizes: Sequence[int]) -> Iterator[tuple[str, Call]]:
    """The layers of a product, which may be several with one input: "layers.0.mlp.gate_proj+up_proj"."""
    scope, _, last = names.rpartition(".")
    start = 0
    for name, size in zip(last.split("+"), sizes, strict=True):
        rows = slice(start, start + size)
        (scale,) = set(call.scale[rows].tolist())
        part = replace(
            call,
            attributes=call.attributes | {"N": int(size)},
            packed=call.packed[rows],
            scale=np.array([scale], np.float32),
            y=call.y[..., rows],
            sums=None if call.sums is None else call.sums[..., rows],
            weight=None if call.weight is None else call.weight[:, rows],
        )
        yield f"{scope}.{name}", part
        start += size


def _makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in graph.node for name in node.output}


def _run(model: onnx.ModelProto, ids: np.ndarray, names: set[str], isa: str | None) -> dict[str, np.ndarray]:
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in model.graph.initializer}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names - set(constants)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if isa is not None:
        options.register_custom_ops_library(str(native.library()))
    with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
    }
    for value in session.get_inputs()[3:]:  # an empty cache
        shape = [len(ids), *(dim if isinstance(dim, int) else 0 for dim in value.shape[1:])]
        feeds[value.name] = np.zeros(shape, np.float32)
    outputs = [value.name for value in session.get_outputs()]
    return constants | dict(zip(outputs, session.run(outputs, feeds), strict=True))


def through_a_kernel(call: Call, isa: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The integers q [..., K], steps a [..., 1] and integer sums [..., N] that a kernel makes of the call's input.

    Weights with a single 1 give the product q_k a; weights 1, -1 give (q_k - q_j) a. Of so many integers one is 1 or
    -1, so the smallest product is a itself, to the bit; that all others are float32(integer * a) is checked. The
    layer's own weights at scale 1 show the sums in the same way: products with a of neighbouring integers below 2^21
    lie further apart than rounding reaches.
    """
    columns = call.spread.shape[-1]
    one = torch.eye(columns, dtype=torch.int8)
    probes = torch.cat([one, *(one - one.roll(apart, 1) for apart in range(1, columns // 2 + 1))])
    shown = _kernel(call, isa, ternary_matmul.pack(probes).numpy())
    a = np.where(shown == 0, np.inf, np.abs(shown)).min(-1, keepdims=True)
    q = _integers(shown, a)[..., :columns]
    return q, a, _integers(_kernel(call, isa, call.packed), a)


def _kernel(call: Call, isa: str, packed: np.ndarray) -> np.ndarray:
    inputs = {"A": call.spread, "packed": packed, "scale": np.ones(1, np.float32)}
    attributes = call.attributes | {"N": len(packed)}
    (y,) = run_node(body_of(ternary_matmul.function), inputs, attributes, {"Y": 3}, ("packed", "scale"), isa)
    return y


def _integers(products: np.ndarray, a: np.ndarray) -> np.ndarray:
    whole = np.rint(products.astype(np.float64) / a)
    assert np.abs(whole).max() < 2**21
    assert np.array_equal(whole.astype(np.float32) * a, products), "products that are no whole numbers times a step"
    return whole.astype(np.int64)
