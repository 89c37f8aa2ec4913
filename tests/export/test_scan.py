"""A loop in a graph: states, outputs, and values from outside its body."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from diffbit.export.onnx_graph import MODEL, OnnxGraph


def test_a_loop_carries_states_and_stacks_outputs(tmp_path: Path) -> None:
    g = OnnxGraph(tmp_path, "fp32")
    state, rows = g.input("state", np.float32, ["b", 2]), g.input("rows", np.float32, ["b", "s", 2])
    double = g.op("Add", [state, state])
    with g.scope("layer"):
        for turn in range(2):  # names of two loops differ

            def step(total: onnx.ValueInfoProto, row: onnx.ValueInfoProto) -> tuple:
                total = g.op("Add", [total, row])
                return total, g.op("Mul", [g.op("Add", [total, double]), g.const(10, np.float32)])

            last, seen = g.scan(step, [state], [rows])
            g.output(f"last_{turn}", last, np.float32, ["b", 2])
            g.output(f"seen_{turn}", seen, np.float32, ["b", "s", 2])
    g.save()
    onnx.checker.check_model(onnx.load(tmp_path / MODEL), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / MODEL, providers=["CPUExecutionProvider"])
    start, values = np.ones((3, 2), np.float32), np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    sums = 1 + values.cumsum(1)
    for last, seen in zip(*[iter(session.run(None, {"state": start, "rows": values}))] * 2, strict=True):
        np.testing.assert_array_equal(last, sums[:, -1])
        np.testing.assert_array_equal(seen, 10 * (sums + 2))
