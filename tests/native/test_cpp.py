"""examples/cpp/run.cpp, compiled and run beside the Python wheel's ONNX Runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import pytest
import torch

from diffbit.export import export_artifact
from diffbit.models import Decoder, LayerSpec, ModelConfig, save
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import mamba
from diffbit.models.mlp import swiglu
from diffbit.runtime import Artifact, Session
from diffbit.runtime.native import library

from ..export.helpers import write_tokenizer
from .host import ROOT, skip

PROMPT = [315, 221, 7]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = library()
    if not shutil.which("c++") or path is None:
        skip("needs a C++ compiler and the native library")
    folder = tmp_path_factory.mktemp("cpp")
    (runtime,) = (Path(onnxruntime.__path__[0]) / "capi").glob("libonnxruntime.so.1.*")
    (folder / "libonnxruntime.so.1").symlink_to(runtime)  # the name that it gives itself
    (folder / "libdiffbit_ops.so").symlink_to(path)
    include = [f"-I{ROOT / 'tests' / 'native' / 'stand_in'}", f"-I{ROOT / 'csrc' / 'ort'}"]
    link = [f"-L{folder}", "-ldiffbit_ops", "-l:libonnxruntime.so.1", f"-Wl,-rpath,{folder}"]
    source = ROOT / "examples" / "cpp" / "run.cpp"
    command = [
        "c++",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        *include,
        str(source),
        "-o",
        str(folder / "run"),
        *link,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def run(program: Path, artifact: Path, *ids: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(artifact), "16", *map(str, ids)]
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "1", "MALLOC_PERTURB_": "186"}  # new memory holds 3156.3
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def with_states(tmp_path: Path) -> Path:
    """An artifact whose cache has states of a fixed size beside keys and values."""
    torch.manual_seed(0)
    mixers = mamba.Options(64, 8, 4, 32), diff_v1.Options(2, 1, 16)
    layers = tuple(LayerSpec(mixer, swiglu.Options(128)) for mixer in mixers)
    save(Decoder(ModelConfig(vocab_size=400, hidden_size=64, layers=layers, max_position=64)), tmp_path / "float")
    write_tokenizer(tmp_path / "float", 400)
    return export_artifact(tmp_path / "float", tmp_path / "artifact")


@pytest.mark.parametrize("name", ["nano", "with_states"])
def test_the_program_writes_the_tokens_of_a_session(program: Path, name: str, request: pytest.FixtureRequest) -> None:
    artifact = Artifact.open(name if name == "nano" else request.getfixturevalue(name))
    session = Session(artifact)
    expected = [int(session.prefill([PROMPT])[0].argmax())]
    while len(expected) < 16:
        expected.append(int(session.prefill([expected[-1:]])[0].argmax()))
    done = run(program, artifact.path, *PROMPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [int(line) for line in done.stdout.split()] == expected


def test_the_program_prints_onnx_runtimes_error(program: Path, tmp_path: Path) -> None:
    done = run(program, tmp_path, *PROMPT)
    assert done.returncode == 1 and "model.onnx" in done.stderr


def test_the_header_is_c(tmp_path: Path) -> None:
    if not shutil.which("cc"):
        skip("needs a C compiler")
    source = tmp_path / "x.c"
    source.write_text(
        '#include "diffbit_ops.h"\n'
        "OrtStatus* (*entry)(OrtSessionOptions*, const OrtApiBase*) = RegisterCustomOps;\n"
        "int main(void) { return *diffbit_isas(); }\n"
    )
    command = [
        "cc",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-fsyntax-only",
        f"-I{ROOT / 'csrc' / 'ort'}",
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
