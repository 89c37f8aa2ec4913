"""Folders in other libraries' layouts become the artifact that diffbit's own folder becomes, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diffbit.export import export_artifact, export_checkpoint
from diffbit.formats import parse_format
from diffbit.quantize import Scheme, quantize_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("gptq", "int4_g32"),
        ("gptq", "int4_g128_asym"),
        ("compressed-tensors", "int4_g32"),
        ("compressed-tensors", "int8"),
        ("bitsandbytes", "nf4"),
        ("bitsandbytes", "fp4"),
    ],
)
def test_the_artifact_is_the_same(layout: str, format: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    ours = tmp_path / "own"
    quantize_checkpoint(trained("diff_v1"), ours, Scheme(weights=parse_format(format)))
    export_checkpoint(ours, tmp_path / "theirs", layout)
    artifacts = [export_artifact(folder, folder.with_suffix(".onnx")) for folder in (ours, tmp_path / "theirs")]
    for name in ("model.onnx", "model.onnx.data"):
        assert (artifacts[0] / name).read_bytes() == (artifacts[1] / name).read_bytes(), name
