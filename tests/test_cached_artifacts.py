"""A model that is run becomes an artifact in the user's cache folder, once."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.cli import artifacts
from diffbit.cli.app import main
from diffbit.cli.automatic import FAST
from diffbit.models import ModelConfig
from diffbit.quantize import forecast
from diffbit.quantize.methods import Recipe

from .apps.web.test_site import fake_modules
from .models.test_gguf import of_byte_level
from .models.test_gguf import write as write_gguf

PROMPT = "def main("
GREEDY = ("-n", "9", "--temperature", "0")


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
    return {manifest.parent for manifest in cache.glob("*/*/diffbit.json")}


def test_the_artifact_is_written_once(
    checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps"
    diffbit(capfd, "quantize", checkpoint, "--weights", "int8", "-o", steps)
    diffbit(capfd, "export", steps, "-o", tmp_path / "onnx")
    _, text, _ = diffbit(capfd, "run", tmp_path / "onnx", PROMPT, *GREEDY)
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    command = ("run", model, PROMPT, *GREEDY, "--quantize")
    code, out, err = diffbit(capfd, *command, "int8")
    (folder,) = kept(cache)
    assert (code, out) == (0, text) and f"kept in {folder}" in err
    assert folder.name == json.loads((folder / "diffbit.json").read_text())["name"] == "model-int8"

    def fail(*arguments: object) -> None:
        raise AssertionError("it is written again")

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "_write", fail)
        assert diffbit(capfd, *command, "int8")[:2] == (0, text)
    os.truncate(folder / "model.onnx.data", 100)
    assert diffbit(capfd, *command, "int8")[:2] == (0, text)
    assert kept(cache) == {folder}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert diffbit(capfd, *command, "int8")[0] == 0
    assert diffbit(capfd, *command, "int8_g32")[0] == 0
    assert len(kept(cache)) == 3


def test_what_cannot_be_quantized(
    checkpoint: Path, quantized: Path, artifact: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for model, format, words in (
        (artifact, "int8", "is an artifact"),
        (checkpoint, "int99", "int99"),
        (quantized, "int8", "quantized"),
    ):
        code, _, err = diffbit(capfd, "run", model, PROMPT, "--quantize", format, "-q")
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err, err
    assert not kept(cache)


def test_a_model_that_is_run_unasked(
    checkpoint: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is quantized, measured and kept, and the next start says what it has, and is the same."""
    command = ("run", checkpoint, PROMPT, *GREEDY)
    code, text, err = diffbit(capfd, *command)
    (folder,) = kept(cache)
    line = next(line for line in err.splitlines() if "as in float" in line)
    assert code == 0 and folder.name == checkpoint.name and f"\nkept in {folder}\n" in err
    assert line.startswith(f"{checkpoint}: {FAST}, ") and "kB, " in line and "% of the tokens as in float" in line
    assert json.loads((folder / "diffbit.json").read_text())["scheme"]["weights"] == FAST
    monkeypatch.setattr(artifacts, "_write", None)
    code, again, err = diffbit(capfd, *command)
    assert (code, again, err.splitlines()[:2]) == (0, text, [line, f"kept in {folder}"])
    (folder.parent / artifacts.MADE).unlink()
    code, again, err = diffbit(capfd, *command)
    assert (code, again) == (0, text) and err.startswith("kept in ")
    assert diffbit(capfd, *command, "--quiet") == (0, text, "")


def test_a_page_has_the_artifact_that_run_has(
    checkpoint: Path, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site, packages = tmp_path / "site", fake_modules(tmp_path / "node_modules")
    command = ("web", checkpoint, "-o", site, "--packages", packages, "--slow")
    code, _, err = diffbit(capfd, *command)
    (folder,) = kept(cache)
    assert code == 0 and f"{checkpoint}: {FAST}, " in err and f"\nkept in {folder}\n" in err
    assert (site / "model" / "diffbit.json").read_bytes() == (folder / "diffbit.json").read_bytes()
    code, _, err = diffbit(capfd, "run", checkpoint, PROMPT, *GREEDY)
    assert code == 0 and kept(cache) == {folder}
    code, _, err = diffbit(capfd, *command, "--quantize", "int8")  # before it works: the folder is not empty
    assert code == 2 and "already exists" in err and kept(cache) == {folder}


def test_models_that_stay_as_they_are(
    checkpoint: Path, quantized: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A quantized checkpoint has its own formats; bench, which measures a model, keeps nothing of it."""
    for model in (quantized, checkpoint):
        code, _, err = diffbit(capfd, "bench", model, "--prompt-tokens", "4", "--new-tokens", "4", "--repeats", "1")
        assert code == 0 and "exported to a temporary folder" in err and "--quantize" not in err
    assert not kept(cache)
    code, _, err = diffbit(capfd, "run", quantized, PROMPT, *GREEDY)
    (first,) = kept(cache)
    assert code == 0 and "in its own formats" in err and "--quantize" not in err
    code, _, err = diffbit(capfd, "run", checkpoint, PROMPT, *GREEDY, "--quantize", "none")
    (second,) = kept(cache) - {first}
    assert code == 0 and "float, " in err and json.loads((second / "diffbit.json").read_text())["scheme"] is None


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(("format", "expected"), [("auto", FAST), ("int4_g32", "int4_g32")])
def test_a_large_model_is_rounded_quickly(
    format: str,
    expected: str,
    reads: bool,
    checkpoint: Path,
    cache: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """reads: whether there is time to weigh the rounding with text."""

    def seconds(config: ModelConfig, recipe: Recipe, text: object) -> float:
        return 1 if reads and recipe.name == "rtn" else artifacts.PATIENCE + 1

    monkeypatch.setattr(forecast, "quantize_seconds", seconds)
    code, _, err = diffbit(capfd, "run", checkpoint, PROMPT, *GREEDY, "--quantize", format)
    (folder,) = kept(cache)
    manifest = json.loads((folder / "diffbit.json").read_text())
    assert code == 0 and (manifest["method"], manifest["scheme"]["weights"]) == ("rtn", expected)
    assert (manifest["calibration"] is not None) == reads and ("not compared with the float model" in err) != reads


def test_another_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, waits = tmp_path / "key" / "model", list[float]()
    code = (
        "import sys; from diffbit.io.files import locked\nwith locked(sys.argv[1]): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                other.communicate("\n")

        monkeypatch.setattr(artifacts.time, "sleep", sleep)
        with artifacts._locked(folder):
            assert waits == [artifacts.WAIT] * 2
        err = capfd.readouterr().err
        assert err.count("waiting: ") == 1 and f"process {other.pid} is writing there" in err


def test_a_gguf_file_becomes_a_conversation(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer([PROMPT * 200], 300, tmp_path)
    tokenizer = of_byte_level(tmp_path, "gpt-2")
    plain = write_gguf(tmp_path / "plain.gguf", tokenizer=tokenizer)
    talks = write_gguf(tmp_path / "talks.gguf", tokenizer=tokenizer | {"chat_template": "{{ messages[-1].content }}"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    code, _, err = diffbit(capfd, "chat", plain)
    assert code == 2 and "has no chat template" in err and "--template" in err and not kept(cache)
    code, out, err = diffbit(capfd, "chat", talks, "-n", "4", "--json")
    (folder,) = kept(cache)
    assert code == 0 and len(json.loads(out)["token_ids"]) == 4 and folder.name == "talks"


def test_what_is_no_model(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, words in (("nothing", "no such file or folder"), ("file", "is no model"), ("folder", "is no model")):
        code, _, err = diffbit(capfd, "run", tmp_path / name, PROMPT)
        assert code == 2 and words in err and "hf:ORG/NAME" in err and "GGUF" in err and err.count("\n") == 1


def test_a_cache_that_cannot_be_written(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, _, err = diffbit(capfd, "run", checkpoint, PROMPT)
    assert code == 2 and "set XDG_CACHE_HOME" in err and err.count("\n") == 1


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
