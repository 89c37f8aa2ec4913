"""Artifacts in WebAssembly, in Node.js: greedy tokens and logits are those of a Session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session

from .modules import module, node

pytestmark = pytest.mark.slow

TOKENS = 24
# variant, weights, keys, values, tokens of the prompt, and how many of them a step takes
CASES = [
    ("softmax", None, None, None, 40, 40),
    ("diff_v1", "int4_g32", None, None, 200, 200),  # the cache grows, and the prompt takes several runs
    ("diff_v2", "int8", "fp16", "fp16", 33, 7),
    ("diff_v1", "ternary", "int8", "int8", 40, 9),
    ("softmax", "int3_g32_s8", "int4", "int4", 130, 50),
    ("diff_v2", "nl4_g32_s8", "int4", "int2", 130, 31),
    ("diff_v1", "int2_g32_s8", None, None, 20, 1),
    ("softmax", "int5_g32_s8", "int3", "int3", 130, 3),
    ("diff_v2", "int6_g32_s8", None, None, 20, 20),
]


def exported(source: Path, folder: Path, weights: str | None, keys: str | None, values: str | None) -> Path:
    if weights is None:
        return export_artifact(source, folder / "artifact")
    scheme = Scheme(
        weights=parse_format(weights),
        embedding=parse_format("int8"),
        head=parse_format("int8"),
        attention=AttentionScheme(keys=keys, values=values),
    )
    quantize_checkpoint(source, folder / "low", scheme)
    return export_artifact(folder / "low", folder / "artifact")


def run(artifact: Path, prompt: list[int], step: int, threads: int = 1, relaxed: bool = False) -> dict[str, Any]:
    output = node("greedy.mjs", artifact, module(relaxed), threads, TOKENS, step, *prompt)
    result: dict[str, Any] = json.loads(output)
    return result


@pytest.mark.parametrize(("variant", "weights", "keys", "values", "length", "step"), CASES)
def test_tokens_and_logits_are_those_of_a_session(
    variant: str, weights: str | None, keys: str | None, values: str | None, length: int, step: int,
    trained: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    artifact = exported(trained(variant), tmp_path, weights, keys, values)
    prompt = np.random.default_rng(length).integers(1, 1000, length).tolist()
    session = Session(artifact)
    logits = [session.prefill([prompt])[0]]
    for _ in range(TOKENS - 1):
        logits.append(session.prefill([[int(logits[-1].argmax())]])[0])
    got = run(artifact, prompt, step)
    assert "error" not in got, got
    assert got["ids"] == [int(one.argmax()) for one in logits]
    # an activation that is rounded the other way, because its last bit differs, changes a logit by little
    spread = float(np.std(logits))
    assert np.abs(np.array(got["logits"]) - logits).max() < (0.05 if weights else 1e-4) * spread
    assert got["again"][0], "another run gives other bits"
    assert all(got["again"]), "after truncate, the tokens differ"
    other = run(artifact, prompt, step, threads=3, relaxed=True)
    assert other["threads"] == 3 and other["left"] == got["left"] == 0, "loads that failed left threads behind"
    assert (other["ids"], other["logits"]) == (got["ids"], got["logits"]), "threads, relaxed SIMD: other bits"


def test_an_unknown_operator_is_refused_by_name(trained: Callable[[str], Path], tmp_path: Path) -> None:
    artifact = export_artifact(trained("softmax"), tmp_path / "artifact")
    model = onnx.load(artifact / "model.onnx", load_external_data=False)
    next(one for one in model.graph.node if one.op_type == "Shape").op_type = "Softsign"
    onnx.save(model, artifact / "model.onnx")
    got = run(artifact, [1], 1)
    assert got["error"] == "Unsupported: the runtime for WebAssembly has no operator Softsign"
    next(one for one in model.graph.node if one.op_type == "Softsign").op_type = "Shape"
    next(one for one in model.graph.node if one.domain == "diffbit").op_type = "Nothing"
    onnx.save(model, artifact / "model.onnx")
    assert run(artifact, [1], 1)["error"] == "Unsupported: the runtime for WebAssembly has no operator diffbit.Nothing"


def test_a_damaged_graph_is_an_error(trained: Callable[[str], Path], tmp_path: Path) -> None:
    artifact = export_artifact(trained("softmax"), tmp_path / "artifact")
    data = (artifact / "model.onnx").read_bytes()
    (artifact / "model.onnx").write_bytes(data[: len(data) // 2])
    assert "model.onnx" in run(artifact, [1], 1)["error"]
    (artifact / "model.onnx").write_bytes(data)
    weights = artifact / "model.onnx.data"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert run(artifact, [1], 1)["error"] == "Error: model.onnx.data: ends before its weights do"
