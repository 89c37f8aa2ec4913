"""`--quantize`: a checkpoint becomes an artifact in the user's cache folder, once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from diffbit.cli import artifacts
from diffbit.cli.app import main

PROMPT = "def main("


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diffbit"


def diffbit(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    captured = capfd.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, captured.out, captured.err


def kept(cache: Path) -> set[Path]:
    return {manifest.parent for manifest in cache.glob("*/diffbit.json")}


def test_the_artifact_is_written_once(
    checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps"
    diffbit(capfd, "quantize", checkpoint, "--weights", "int4_g32", "-o", steps)
    diffbit(capfd, "export", steps, "-o", tmp_path / "onnx")
    _, text, _ = diffbit(capfd, "run", tmp_path / "onnx", PROMPT, "-n", "9")
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    command = ("run", model, PROMPT, "-n", "9", "--quantize")
    code, out, err = diffbit(capfd, *command, "int4_g32")
    (folder,) = kept(cache)
    assert (code, out) == (0, text) and str(folder) in err
    assert json.loads((folder / "diffbit.json").read_text())["name"] == "model-int4_g32"

    def fail(*arguments: object) -> None:
        raise AssertionError("it is written again")

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "_write", fail)
        assert diffbit(capfd, *command, "int4_g32")[:2] == (0, text)
    os.truncate(folder / "model.onnx.data", 100)
    assert diffbit(capfd, *command, "int4_g32")[:2] == (0, text)
    assert kept(cache) == {folder}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert diffbit(capfd, *command, "int4_g32")[0] == 0
    assert diffbit(capfd, *command, "int8")[0] == 0
    assert len(kept(cache)) == 3


def test_what_cannot_be_quantized(
    checkpoint: Path, quantized: Path, artifact: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for model, format, words in (
        (artifact, "int8", "is an artifact"),
        (checkpoint, "none", "wanted a format"),
        (checkpoint, "int99", "int99"),
        (quantized, "int8", "quantized"),
    ):
        code, _, err = diffbit(capfd, "run", model, PROMPT, "--quantize", format, "-q")
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err, err
    assert not kept(cache)


def test_hashes_of_large_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    monkeypatch.setattr(artifacts, "LARGE", 3)
    first = artifacts._sha256(file, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "sha256_file", None)
        assert artifacts._sha256(file, tmp_path / "cache") == first
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(0, 0))
    assert artifacts._sha256(file, tmp_path / "cache") != first


def test_parts_of_a_gguf_file_are_its_sources(tmp_path: Path) -> None:
    names = [f"m[1]-0000{part}-of-00002.gguf" for part in (1, 2)]
    for name in (*names, "other.gguf"):
        (tmp_path / name).touch()
    assert [file.name for file in artifacts._sources(tmp_path / names[0])] == names
    assert [file.name for file in artifacts._sources(tmp_path / "other.gguf")] == ["other.gguf"]
