"""Quantizing on another device: every tensor goes there, and the bytes that come back are those of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffbit import models
from diffbit.cli.app import main
from diffbit.formats import parse_format
from diffbit.io.processes import Processes
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize.methods import gptq

from .elsewhere import DEVICE, Elsewhere

INT4 = parse_format("int4_g32")
CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=40,
    attention="diff_v1", tie_embeddings=True,
)  # fmt: skip
IDS = torch.randint(96, (5, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < torch.tensor([12, 12, 7, 12, 0])[:, None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "float"
    models.save(Decoder(CONFIG), folder, dtype=torch.bfloat16)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_tensors_that_are_left_behind_show() -> None:
    with Elsewhere():
        there = torch.ones(3).to(DEVICE)
        assert (there.device, (2 * there).cpu().tolist()) == (DEVICE, [2.0] * 3)
        with pytest.raises(AssertionError, match="tensors on two devices"):
            there + torch.ones(3)


@pytest.mark.parametrize(
    ("method", "spills"),
    [
        ("rtn", True),
        *(
            pytest.param(method, False, marks=pytest.mark.slow)
            for method in ("hqq", "clip", "awq", "rotate+learned:2", "rotate_heads+gptq")
        ),
    ],
)
def test_a_device_gives_the_same_bytes(
    method: str, spills: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffbit.quantize.checkpoint.must_spill", lambda *_: spills)
    monkeypatch.setattr(gptq, "ROUNDS", 1)  # more of them are no other code
    scheme = Scheme(weights=INT4, embedding=INT4, head=INT4)

    def run(name: str, **options: Any) -> dict[str, Any]:
        text = {"method": method, "calibration": IDS, "calibration_mask": MASK}
        with sdpa_kernel(SDPBackend.MATH):  # torch has another order of sums for attention on each device
            return quantize_checkpoint(model, tmp_path / name, scheme, **text, **options).to_dict()

    report = run("here")
    with Elsewhere():
        assert run("there", workers=Processes(0, 1, DEVICE)) == report
    assert content(tmp_path / "there") == content(tmp_path / "here")


@pytest.mark.slow
def test_the_command_gives_the_same_bytes_on_a_device(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    options = ["--weights", "int4_g32", "--method", "gptq", "--max-windows", "2", "--length", "24", "--no-measure"]
    with Elsewhere(), sdpa_kernel(SDPBackend.MATH):
        for device in ("cpu", "cuda"):
            with pytest.raises(SystemExit) as stopped:
                main(["quantize", str(checkpoint), *options, "--device", device, "-o", str(tmp_path / device), "-q"])
            assert stopped.value.code == 0
    actual, expected = content(tmp_path / "cuda"), content(tmp_path / "cpu")
    assert actual == expected


def test_what_a_gpu_cannot_do_is_a_sentence(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sentence() -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["quantize", str(checkpoint), "--weights", "int8", "--device", "cuda", "-o", str(tmp_path / "q")])
        assert stopped.value.code == 2 and not any(tmp_path.iterdir())
        (line,) = capsys.readouterr().err.splitlines()
        return line

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA GPU; pass cpu" in sentence()
    monkeypatch.setattr("diffbit.cli.automatic.processes", lambda device: Processes(0, 1, DEVICE))
    monkeypatch.setattr("diffbit.quantize.checkpoint.quantize_checkpoint", full)
    assert sentence().startswith("error: the GPU's memory does not suffice (CUDA out of memory. Tried to allocate 2.00")
