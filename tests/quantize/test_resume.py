"""Interrupted runs go on from the last finished layer to the very same bytes; tests/kill has those that are killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffbit import models
from diffbit.cli.app import main
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize.methods import gptq

CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=48,
    attention="diff_v1", tie_embeddings=True,
)  # fmt: skip
PER_LAYER = 7
IDS = torch.randint(96, (5, 20), generator=torch.Generator().manual_seed(0))
SCHEME = Scheme(weights=parse_format("int4_g32"), overrides=(("lm_head", parse_format("int4_g64")),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "float"
    models.save(Decoder(CONFIG), folder, dtype=torch.bfloat16)
    return folder


def run(model: Path, output: Path, **options: Any) -> dict[str, Any]:
    report = quantize_checkpoint(model, output, SCHEME, **{"method": "rotate+gptq", "calibration": IDS, **options})
    return report.to_dict()


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(model: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """What a run gives that is never interrupted."""
    report = run(model, model.with_name("whole"))
    assert not model.with_name("whole.unfinished").exists()
    return content(model.with_name("whole")), report


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every weight that is rounded."""
    calls: list[int] = []
    exact = gptq.quantize

    def counted(*arguments: Any) -> Any:
        calls.append(len(calls))
        return exact(*arguments)

    monkeypatch.setattr(gptq, "METHOD", replace(gptq.METHOD, round=counted))
    return calls


def interrupted(model: Path, output: Path, after: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A run that fails with its weight number `after`."""
    exact, calls = gptq.quantize, iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) == after:
            raise error
        return exact(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(gptq, "METHOD", replace(gptq.METHOD, round=failing))
        with pytest.raises(type(error)):
            run(model, output)
    assert not output.exists()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
def test_a_run_that_failed_goes_on(
    error: BaseException, model: Path, whole: Any, rounded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(model, tmp_path / "q", 2 * PER_LAYER + 3, monkeypatch, error)
    rounded.clear()
    report = run(model, tmp_path / "q", resume=True)
    assert len(rounded) == PER_LAYER + 1, "the third layer and the head, no more"
    assert (content(tmp_path / "q"), report) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


@pytest.fixture
def unfinished(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output folder of a run that was interrupted in its second layer."""
    interrupted(model, tmp_path / "q", PER_LAYER + 1, monkeypatch, RuntimeError("broken"))
    assert (tmp_path / "q.unfinished" / "run.json").is_file()
    return tmp_path / "q"


def test_without_resume_it_is_refused_or_overwritten(model: Path, whole: Any, unfinished: Path) -> None:
    with pytest.raises(DiffbitError, match=r"q\.unfinished: .*--resume .*--overwrite"):
        run(model, unfinished)
    run(model, unfinished, overwrite=True)
    assert content(unfinished) == whole[0]
    assert not unfinished.with_name("q.unfinished").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"calibration": IDS.flip(0)}, "calibration"),
        ({"calibration_mask": IDS > 3}, "calibration"),
        ({"calibration": None, "method": "rotate"}, "method rotate[+]gptq, now it is rotate"),
        ({"method": "gptq"}, "method rotate[+]gptq, now it is gptq"),
        ({"calibration_text": {"source": "a book"}}, "text None, now it is .*a book"),
    ],
)
def test_another_run_does_not_go_on(options: dict[str, Any], words: str, model: Path, unfinished: Path) -> None:
    with pytest.raises(DiffbitError, match=rf"q\.unfinished: was started with {words}.*--overwrite"):
        run(model, unfinished, resume=True, **options)
    assert unfinished.with_name("q.unfinished").is_dir(), "it may still go on as it was begun"


def test_another_scheme_or_model_does_not_go_on(model: Path, unfinished: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "rotate+gptq", "calibration": IDS, "resume": True}
    with pytest.raises(DiffbitError, match="was started with scheme"):
        quantize_checkpoint(model, unfinished, replace(SCHEME, activations="int8"), **options)
    shutil.copytree(model, tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DiffbitError, match="was started with model"):
        run(tmp_path / "other", unfinished, resume=True)


def test_a_damaged_folder_is_refused(model: Path, unfinished: Path) -> None:
    """One bit anywhere, a file cut short or missing: its name and what to do, and never another model."""
    folder = unfinished.with_name("q.unfinished")
    names = sorted(file.name for file in folder.iterdir())
    layers = [f"layer-0000{index}.{kind}" for index in (0, 1) for kind in ("json", "safetensors")]
    assert names == [*layers, "run.json", "states-00001.safetensors"]

    def refused(name: str) -> None:
        with pytest.raises(DiffbitError, match=rf"{re.escape(name)}: .*--overwrite") as caught:
            run(model, unfinished, resume=True)
        assert "\n" not in str(caught.value) and not unfinished.exists()

    for name in names:
        file = folder / name
        data = file.read_bytes()
        for place in (0, 9, len(data) // 3, len(data) // 2, len(data) - 3):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 7]) + data[place + 1 :])
            refused(name)
        file.write_bytes(data[: len(data) // 2])
        refused(name)
        if file.suffix == ".safetensors":
            file.unlink()
            refused(name)
        file.write_bytes(data)
    (folder / "run.json").unlink()
    with pytest.raises(DiffbitError, match=r"q\.unfinished: has no run\.json"):
        run(model, unfinished, resume=True)


def test_a_layer_damaged_during_the_run_is_refused(
    model: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = unfinished.with_name("q.unfinished") / "layer-00000.safetensors"
    exact = gptq.quantize

    def damage(*arguments: Any) -> Any:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        return exact(*arguments)

    monkeypatch.setattr(gptq, "METHOD", replace(gptq.METHOD, round=damage))
    with pytest.raises(DiffbitError, match=r"layer-00000\.safetensors: is damaged"):
        run(model, unfinished, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_a_run_that_can_go_on(
    number: int,
    code: int,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
    request: pytest.FixtureRequest,
) -> None:
    """They end in one sentence, the command that goes on, and nothing half written."""
    calls, before = iter(range(100)), signal.getsignal(signal.SIGTERM)
    at_start = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, at_start))

    def read(*arguments: Any) -> Any:
        return SimpleNamespace(ids=IDS, mask=None, source="a book", sha256="0")

    def quantize(*arguments: Any) -> Any:
        if next(calls) == PER_LAYER + 1:
            os.kill(os.getpid(), number)
        return exact(*arguments)

    exact = gptq.quantize
    monkeypatch.setattr(gptq, "METHOD", replace(gptq.METHOD, round=quantize))
    monkeypatch.setattr("diffbit.cli.scheme_options.read_windows", read)
    command = ["quantize", str(model), "-o", str(tmp_path / "q"), "--weights", "int4_g32", "--method", "gptq"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--quiet"])
    assert left.value.code == code
    error = capsys.readouterr().err
    what = "interrupted" if code == 130 else "terminated"
    kept = tmp_path / "q.unfinished"
    assert error == f"error: {what}; 2 layers are kept in {kept}: the same command with --resume continues\n"
    assert list(tmp_path.iterdir()) == [kept] and not any(file.name.startswith(".") for file in kept.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit) as left:
        main([*command, "--quiet", "--resume"])
    assert left.value.code == 0 and list(tmp_path.iterdir()) == [tmp_path / "q"]


def test_nothing_is_left_where_nothing_is_lost(
    model: Path, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(model, tmp_path / "q", 2, monkeypatch, RuntimeError("broken"))
    assert list(tmp_path.iterdir()) == [], "its first layer was not done"
    run(model, tmp_path / "q", resume=True)  # nothing to resume: from the beginning
    assert content(tmp_path / "q") == whole[0]
    monkeypatch.setattr("diffbit.quantize.resume.Unfinished.add", None)  # plain rounding keeps nothing
    run(model, tmp_path / "plain", method="rtn", calibration=None)
