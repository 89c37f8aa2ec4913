"""Optional inputs: initializers of the file that become inputs when it is opened."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Session
from diffbit.runtime.external import with_inputs

from .toy import random_toy, seal

NAMES = ["logits_from", "shorter_by"]


def write(folder: Path, listed: list[str], inputs: list[str]) -> Path:
    """The random toy with optional inputs: it slices its logits by one, and adds the other to them.

    listed: what the manifest says; inputs: what are inputs in the file.
    """
    random_toy().write(folder, optional_inputs=listed)
    model = onnx.load(folder / "model.onnx")
    logits = model.graph.node[-1]
    logits.output[0] = "plain_logits"
    for name in NAMES:
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [0]))
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, [name]) for name in inputs)
    for name, value in (("end", 1 << 31), ("axis", 1)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))
    nodes = [
        helper.make_node("Slice", ["plain_logits", "logits_from", "end", "axis"], ["last_logits"]),
        helper.make_node("Cast", ["shorter_by"], ["shorter_by_float"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["last_logits", "shorter_by_float"], ["logits"]),
    ]
    model.graph.node.extend(nodes)
    onnx.save(model, folder / "model.onnx")
    manifest = json.loads((folder / "diffbit.json").read_text())
    del manifest["files"]
    seal(folder, manifest)
    return folder


def test_the_bytes_are_those_of_a_graph_with_these_inputs(tmp_path: Path) -> None:
    path = write(tmp_path / "a", NAMES, []) / "model.onnx"
    extended = onnx.load_from_string(with_inputs(path.read_bytes(), NAMES))
    expected = onnx.load(path)
    expected.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, [name]) for name in NAMES)
    assert extended == expected
    assert with_inputs(path.read_bytes(), []) == path.read_bytes()


@pytest.mark.parametrize(("listed", "inputs"), [(NAMES, []), ([], NAMES), ([], []), (["logits_from"], ["shorter_by"])])
def test_a_session_has_the_inputs_of_manifest_and_file(tmp_path: Path, listed: list[str], inputs: list[str]) -> None:
    """Older artifacts have them in the file. Weights inside the model, and beside it."""
    path = write(tmp_path / "a", listed, inputs)
    for external in (False, True):
        if external:
            model = onnx.load(path / "model.onnx")
            onnx.save(
                model, path / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0
            )
            manifest = json.loads((path / "diffbit.json").read_text())
            del manifest["files"]
            seal(path, manifest)
        session = Session(path, threads=1)
        optional = {node.name for node in session._session.get_overridable_initializers()}  # type: ignore[attr-defined]
        assert optional == {*listed, *inputs}
        assert session.takes_lengths == ("shorter_by" in optional)
        np.testing.assert_allclose(session.prefill([[1, 2, 3]])[0], random_toy().logits([1, 2, 3])[-1], atol=1e-4)


def test_unknown_optional_inputs_are_refused(tmp_path: Path) -> None:
    path = random_toy().write(tmp_path / "a", optional_inputs=["embed"])
    with pytest.raises(DiffbitError, match=r"optional_inputs\[0\] is 'embed'"):
        Session(path)
    path = random_toy().write(tmp_path / "b", optional_inputs=["logits_from"])  # which the graph does not have
    with pytest.raises(DiffbitError, match="logits_from; export the model again"):
        Session(path)
