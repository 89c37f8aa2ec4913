"""Artifacts of `export --target onnxruntime` whose weights are low-bit: ONNX Runtime's own operators multiply them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit import runtime
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session

from .helpers import VARIANTS, graph_of, relative_error

WEIGHTS = {  # of layers, of the embedding; whether ONNX Runtime has an operator for them
    "int4": ("int4_g32", "int8", True),
    "int4 with zero points": ("int4_g64_asym", "int4_g32", True),
    "int8": ("int8_g32", "int8_g32", True),
    "int2": ("int2_g64", None, True),
    "tables of levels": ("nl4_g32_s8", "nl3_g32_s8", True),
    "nf4": ("nf4", None, False),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_and_their_operators(
    variant: str, weights: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """A prompt and steps, without the library, beside torch."""
    layers, table, own = WEIGHTS[weights]
    embedding = None if table is None else parse_format(table)
    scheme = Scheme(weights=parse_format(layers), embedding=embedding, head=embedding)
    quantize_checkpoint(trained(variant), tmp_path / "low", scheme)
    artifact = export_artifact(tmp_path / "low", tmp_path / "artifact", target="onnxruntime")
    nodes = graph_of(artifact).graph.node
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    levels = {attribute.i for node in products for attribute in node.attribute if attribute.name == "accuracy_level"}
    assert levels == {4} or not own
    assert any(node.op_type == "GatherBlockQuantized" for node in nodes) == (own and table is not None)
    assert any(node.op_type == "GroupQueryAttention" for node in nodes)
    custom = {node.op_type for node in nodes if node.domain == "diffbit"}
    assert custom <= {"SiluGate", "FloatMatMul"} or not own
    assert runtime.verify(artifact, native=False).passed and runtime.verify(artifact).passed

    ids = np.random.default_rng(0).integers(3, 1000, (1, 40))
    with torch.inference_mode():
        wanted = reference_model(tmp_path / "low", "onnxruntime")(torch.from_numpy(ids))[0]
    session = Session(artifact, native=False)
    logits = [session.prefill(ids[:, :33]), *(session.step(ids[:, i : i + 1]) for i in range(33, 40))]
    errors = relative_error(np.concatenate(logits), wanted[32:])
    assert np.median(errors) < 0.03 and errors.max() < 0.1  # rounded inputs: a last bit may move one to another code
