"""Run one custom node on ONNX Runtime: with nothing but its model-local function, or with the native library.

@on_each_isa
def test_kernel(isa: str, ...) -> None:
    run_node(..., isa=isa)        # one kernel of the library; isa=None (the default): the body
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import helper

from diffbit.runtime import native

# An installation without a compiler has no library; then there is nothing to run, and the tests of packaging say so
on_each_isa = pytest.mark.parametrize("isa", native.instruction_sets())


def on_isas_in_turn(cases: Sequence[Any], sets: int = 2) -> pytest.MarkDecorator:
    """Each case on so many of the instruction sets, in turn; tests/native/test_host.py has each on all of them.

    The first of them is among the quick tests.
    """
    isas = native.instruction_sets()
    pairs = [(case, (i + j) % len(isas), j) for i, case in enumerate(cases) for j in range(min(sets, len(isas)))]
    slow = pytest.mark.slow
    params = [
        pytest.param(case, isas[isa], id=f"{case.name}-{isas[isa]}", marks=[slow] * (j > 0)) for case, isa, j in pairs
    ]
    return pytest.mark.parametrize(("case", "isa"), params)


def node_of(
    name: str,
    domain: str,
    inputs: dict[str, np.ndarray | None],
    attributes: dict[str, int | float],
    outputs: dict[str, int | None],
) -> onnx.NodeProto:
    """A node; inputs and outputs that are None are empty names."""
    input_names, output_names = (["" if x is None else name for name, x in side.items()] for side in (inputs, outputs))
    return helper.make_node(name, input_names, output_names, domain=domain, **attributes)


@functools.cache
def body_of(function: Callable[..., onnx_ir.Function], *arguments: Hashable) -> onnx.FunctionProto:
    """function(*arguments) as a model holds it; made once."""
    return onnx_ir.to_proto(function(*arguments))


def run_node(
    body: onnx.FunctionProto,
    inputs: dict[str, np.ndarray | None],
    attributes: dict[str, int | float],
    outputs: dict[str, int | None],
    constants: tuple[str, ...] = (),
    isa: str | None = None,
    threads: int = 1,
    kinds: dict[str, int] | None = None,
) -> list[np.ndarray]:
    """The outputs (name -> rank) of a node; inputs named in `constants` become initializers, as weights are.

    Inputs and outputs that are None are left out. Outputs have the element type of the first input, but for those that
    `kinds` (name -> type) names.
    """
    node = node_of(body.name, body.domain, inputs, attributes, outputs)
    inputs = {name: array for name, array in inputs.items() if array is not None}
    outputs = {name: rank for name, rank in outputs.items() if rank is not None}
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
            helper.make_tensor_value_info(name, (kinds or {}).get(name, kind), [f"{name}_{i}" for i in range(rank)])
            for name, rank in outputs.items()
        ],
        [onnx.numpy_helper.from_array(inputs[name], name) for name in constants],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(body.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # a test that expects an error reads it from the exception
    if isa:
        options.register_custom_ops_library(str(native.library()))
    with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(list(outputs), {name: array for name, array in inputs.items() if name not in constants})
