"""One node through ONNX Runtime itself, with the library and nothing else: no body stands behind it."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from diffbit.runtime import native

from .host import CODES
from .nodes import Node


def session(node: Node, isa: str, threads: int = 1, bfloat16: str = "0") -> onnxruntime.InferenceSession:
    """The node as a model; inputs in `node.constants` are weights of the model."""
    inputs = {name: array for name, array in node.inputs.items() if array is not None}
    names = [name if name in inputs else "" for name in node.inputs]
    outputs = [output.name if output else "" for output in node.outputs]
    onnx_node = helper.make_node(node.op, names, outputs, node.name, domain="diffbit")
    onnx_node.attribute.extend(helper.make_attribute(name, value) for name, value in node.attributes.items())

    def value(name: str, dtype: np.dtype, rank: int) -> TensorProto:
        return helper.make_tensor_value_info(name, CODES[dtype], [f"{name}_{i}" for i in range(rank)])

    graph = helper.make_graph(
        [onnx_node],
        "one_node",
        [value(name, array.dtype, array.ndim) for name, array in inputs.items() if name not in node.constants],
        [value(output.name, output.dtype, output.rank) for output in node.outputs if output],
        [numpy_helper.from_array(array, name) for name, array in inputs.items() if name in node.constants],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("diffbit", 1)], ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # after a run; in a run threads spin as ever
    options.log_severity_level = 4  # errors are read from the exceptions
    options.add_session_config_entry("diffbit.bfloat16", bfloat16)
    options.register_custom_ops_library(str(native.library()))
    with mock.patch.dict(os.environ, {native.ISA: isa}):
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, node: Node) -> list[np.ndarray]:
    """The node's outputs; those that share an input's memory lie in a copy of it."""
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy())  # it may keep the array's own memory
        for name, array in node.inputs.items()
        if array is not None and name not in node.constants
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in filter(None, node.outputs):
        if output.shared is None:
            binding.bind_output(output.name)
        else:
            binding.bind_ortvalue_output(output.name, values[output.shared])
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]  # before `values` and its memory go
