from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from diffbit.io.errors import DiffbitError
from diffbit.runtime import native, verify

from .toy import seal


def edit(folder: Path, **golden: Any) -> None:
    """Change golden values and seal the manifest again, as an exporter with other numbers would have."""
    manifest = json.loads((folder / "diffbit.json").read_text())
    del manifest["files"]
    seal(folder, manifest | {"golden": manifest["golden"] | golden})


def names(folder: Path) -> list[str]:
    return [check.name for check in verify(folder).failures]


def test_a_whole_artifact_passes(artifact: Path) -> None:
    result = verify(artifact, threads=1)
    assert result.passed
    assert [check.name for check in result.checks] == [
        *("manifest", "file:model.onnx", "file:tokenizer.json", "external", "tokenizer", "logits", "greedy")
    ]
    assert result.logits_error is not None
    assert result.tolerance == 1e-4
    assert result.logits_error < 1e-5


def test_verify_names_the_failed_checks(artifact: Path) -> None:
    tokenizer = artifact / "tokenizer.json"
    text = tokenizer.read_bytes()
    tokenizer.write_bytes(text.replace(b"a", b"b", 1))
    assert names(artifact) == ["file:tokenizer.json"]
    assert "tokenizer.json: was changed" in verify(artifact).failures[0].detail
    tokenizer.unlink()
    assert names(artifact) == ["file:tokenizer.json"]
    assert verify(artifact).logits_error is None  # a model with changed files is not run
    tokenizer.write_bytes(text)
    assert names(artifact) == []
    manifest = artifact / "diffbit.json"
    manifest.write_text(manifest.read_text().replace('"toy"', '"joy"', 1))
    assert names(artifact) == ["manifest"]


@pytest.mark.parametrize("name", ["index.html", "a.js", "modeling.py", "libdiffbit_ops.so", "x.svg", ".env", "run"])
def test_code_is_refused(artifact: Path, name: str) -> None:
    (artifact / name).write_text("alert(1)")
    manifest = json.loads((artifact / "diffbit.json").read_text())
    del manifest["files"]
    seal(artifact, manifest)
    assert names(artifact) == [f"file:{name}"]
    assert "no model has a file of this name, and it may be code" in verify(artifact).failures[0].detail
    assert verify(artifact).logits_error is None


def test_the_installed_library_is_accepted_in_an_artifact(artifact: Path) -> None:
    """`export --library` puts it there."""
    library = native.library()
    if library is None:
        pytest.skip("the native library is not built")
    shutil.copyfile(library, artifact / library.name)
    manifest = json.loads((artifact / "diffbit.json").read_text())
    del manifest["files"]
    seal(artifact, manifest)
    assert verify(artifact, threads=1).passed
    with (artifact / library.name).open("ab") as file:
        file.write(b"x")
    seal(artifact, manifest)
    assert names(artifact) == [f"file:{library.name}"]


def test_other_weights_fail_although_every_hash_is_right(artifact: Path) -> None:
    model = onnx.load(artifact / "model.onnx")
    tensor = next(t for t in model.graph.initializer if t.name == "out")
    weights = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(weights * np.float32(1.001), "out"))
    onnx.save(model, artifact / "model.onnx")
    edit(artifact)  # the files' new hashes, the old golden logits
    result = verify(artifact)
    assert [check.name for check in result.failures] == ["logits"]
    assert result.logits_error is not None
    assert 1e-3 < result.logits_error < 1e-2  # 0.1 % of the largest logits, in units of the spread
    tensor.CopyFrom(numpy_helper.from_array(-weights, "out"))
    onnx.save(model, artifact / "model.onnx")
    edit(artifact)
    assert names(artifact) == ["logits", "greedy"]


def test_a_near_tie_may_fall_either_way(artifact: Path) -> None:
    golden = json.loads((artifact / "diffbit.json").read_text())["golden"]
    first, second, *rest = golden["logits"]
    tie = (first + second) / 2
    loose = (first - second) / golden["spread"]
    # the exporter saw the runner-up just ahead, within what the tolerance allows
    edit(artifact, logits=[tie - 1e-6, tie, *rest], tolerance=loose)
    assert names(artifact) == []
    edit(artifact, logits=[tie - 1e-6, tie, *rest], tolerance=loose / 10)
    assert names(artifact) == ["logits", "greedy"]


def test_verify_raises_without_an_artifact_or_device(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match="no such artifact folder"):
        verify(tmp_path / "nothing")
    with pytest.raises(DiffbitError, match="device is 'tpu', wanted one of cpu, cuda"):
        verify(artifact, device="tpu")
