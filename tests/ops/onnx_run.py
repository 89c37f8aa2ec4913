"""Run one custom node on ONNX Runtime with nothing but its model-local function."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import onnxruntime
from onnx import helper


def run_node(
    function: onnx_ir.Function,
    inputs: dict[str, np.ndarray],
    attributes: dict[str, int | float],
    outputs: dict[str, int],
    constants: tuple[str, ...] = (),
) -> list[np.ndarray]:
    """The outputs (name -> rank) of a node; inputs named in `constants` become initializers, as weights are."""
    proto = onnx_ir.to_proto(function)
    node = helper.make_node(proto.name, list(inputs), list(outputs), domain=proto.domain, **attributes)
    element = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    kind = element[next(iter(inputs))]
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, element[name], [f"{name}_{i}" for i in range(array.ndim)])
            for name, array in inputs.items()
            if name not in constants
        ],
        [
            helper.make_tensor_value_info(name, kind, [f"{name}_{i}" for i in range(rank)])
            for name, rank in outputs.items()
        ],
        [onnx.numpy_helper.from_array(inputs[name], name) for name in constants],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(proto.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[proto], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(outputs), {name: array for name, array in inputs.items() if name not in constants})
