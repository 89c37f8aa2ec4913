"""Heads of a width that GroupQueryAttention does not take (it takes multiples of 8) have another body."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.export import export_artifact, reference_model
from diffbit.runtime import Session, verify

from .helpers import config_of, graph_of, relative_error, write_model


@pytest.mark.parametrize("attention", ["softmax", "diff_v2"])
@pytest.mark.parametrize("width", [12, 16])
def test_any_width_runs(attention: str, width: int, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", config_of(attention, head_dim=width))
    artifact = export_artifact(source, tmp_path / "onnx")
    in_body = {node.op_type for function in graph_of(artifact).functions for node in function.node}
    assert ("GroupQueryAttention" in in_body) == (width == 16)
    assert verify(artifact).passed
    ids = torch.arange(10)[None] * 7 % 61
    with torch.inference_mode():
        expected = reference_model(source)(ids)[0, 5:]
    for native in (True, False):
        session = Session(artifact, native=native)
        logits = [session.prefill(ids[:, :6].numpy()), *(session.step(ids[:, i : i + 1].numpy()) for i in range(6, 10))]
        assert relative_error(np.concatenate(logits), expected).max() < 1e-4
