"""Ternary weights at 1.6 bits each in the file: the same logits to the bit, natively and by bodies, and the sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from diffbit.errors import DiffbitError
from diffbit.export import export_artifact
from diffbit.quantize import Scheme, parse_format, quantize_checkpoint
from diffbit.runtime import Artifact, native
from diffbit.runtime.providers import open_session

from .helpers import Runner, config_of, graph_of, write_model

CONFIG = config_of("diff_v1", hidden_size=96, intermediate_size=640)  # rows of 24 and of 160 bytes


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in two bits and in base 3."""
    folder = tmp_path_factory.mktemp("base3")
    write_model(folder / "model", CONFIG)
    scheme = Scheme(weights=parse_format("ternary"), overrides=(("lm_head", parse_format("ternary")),))
    quantize_checkpoint(folder / "model", folder / "quantized", scheme)
    for storage in ("2bit", "base3"):
        export_artifact(folder / "quantized", folder / storage, ternary_storage=storage)
    return folder / "2bit", folder / "base3"


def logits(artifact: Path, library: Path | None) -> np.ndarray:
    runner = Runner(artifact, CONFIG)
    runner.session = open_session(artifact / "model.onnx", "cpu", 1, library)
    return runner(np.arange(12)[None], np.ones((1, 12), np.int64))


@pytest.mark.parametrize("library", [None, *([native.library()] if native.instruction_sets() else [])])
def test_logits_are_the_same_to_the_bit(artifacts: tuple[Path, Path], library: Path | None) -> None:
    two_bits, base3 = (logits(artifact, library) for artifact in artifacts)
    assert np.isfinite(two_bits).all() and two_bits.std() > 0
    assert two_bits.tobytes() == base3.tobytes()


def test_everything_is_expanded_at_load(artifacts: tuple[Path, Path], tmp_path: Path) -> None:
    assert "ExpandTrits" in {node.op_type for node in graph_of(artifacts[1]).graph.node}
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(artifacts[1] / "model.onnx", options, providers=["CPUExecutionProvider"])
    loaded = {node.op_type for node in onnx.load(tmp_path / "loaded.onnx", load_external_data=False).graph.node}
    assert "MatMulInteger" in loaded and not {"QLinearConv", "BitShift", "BitwiseAnd"} & loaded


def test_sizes(artifacts: tuple[Path, Path]) -> None:
    parts = []
    for artifact in artifacts:
        manifest = json.loads((artifact / "diffbit.json").read_text())
        assert sum(part["bytes"] for part in manifest["parts"]) == sum(f["bytes"] for f in manifest["files"].values())
        parts.append({part["name"]: part for part in manifest["parts"]})
    two_bits, base3 = (part["ternary codes"] for part in parts)
    assert base3["weights"] == two_bits["weights"]
    assert 8 * two_bits["bytes"] == 2 * two_bits["weights"]
    assert 1.6 <= 8 * base3["bytes"] / base3["weights"] < 1.65
    # in memory, where a token reads them, they are the same
    assert len({Artifact.open(artifact).bytes_per_token(8) for artifact in artifacts}) == 1


def test_what_cannot_be(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match="has no ternary weights to store in base3"):
        export_artifact(checkpoint, tmp_path / "out", ternary_storage="base3")
    with pytest.raises(DiffbitError, match="'base4', wanted one of 2bit, base3"):
        export_artifact(checkpoint, tmp_path / "out", ternary_storage="base4")
    assert not (tmp_path / "out").exists()
