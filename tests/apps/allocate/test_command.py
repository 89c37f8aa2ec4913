"""`diffbit allocate`: one writer at a time, a mixed KV cache, budgets that are refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.io.files import locked
from diffbit.models import Checkpoint
from diffbit.quantize import Scheme, quantize_checkpoint, read_scheme
from diffbit.runtime import Artifact


def test_second_writer_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("diffbit.apps.allocate.command._text", None)  # where the work begins
    scheme, is_locked, may_end = tmp_path / "scheme.toml", threading.Event(), threading.Event()

    def write() -> None:
        with locked(scheme):
            is_locked.set()
            may_end.wait(60)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert is_locked.wait(60)
        with pytest.raises(SystemExit) as done:
            main(["allocate", "examples/pico/softmax", "--bits", "4", "-o", str(scheme)])
    finally:
        may_end.set()
        writer.join()
    assert done.value.code == 2 and "scheme.toml: another thread is writing there" in capsys.readouterr().err
    assert not scheme.exists()


BUDGET = 256  # bytes a token; all int4 takes 288
PICO = "examples/pico/softmax"
FEW = ["--calibrate", "stdlib", "--max-windows", "2", "--length", "128", "--quiet"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(["allocate", PICO, *arguments])
    assert isinstance(done.value.code, int)
    return done.value.code


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_mixed_cache_reaches_the_artifact(
    with_weights: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheme of `--kv-size`, alone and with one for weights: quantized, exported, and as small as was asked for."""
    path, budget = tmp_path / "scheme.toml", BUDGET
    weights = ["--bits", "5", "--method", "rtn", "--candidates", "int4_g32,int8"] if with_weights else []
    assert run("--kv-size", f"{budget}B", *weights, *FEW, "--json", "-o", str(path)) == 0
    found = json.loads(capsys.readouterr().out)
    scheme = Scheme.from_file(path)
    assert scheme.attention.to_dict() == found["cache"]["attention"] and len(scheme.attention.layers) > 0
    assert (scheme.weights is not None) is with_weights is ("bits_per_weight" in found)
    quantize_checkpoint(PICO, tmp_path / "q", scheme)
    assert read_scheme(Checkpoint(tmp_path / "q")).attention == scheme.attention
    cache = Artifact.open(export_artifact(tmp_path / "q", tmp_path / "a")).cache
    assert cache.bytes_per_1k_tokens == 1000 * found["cache"]["nbytes"] <= 1000 * budget


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kv-size", "20"], "--kv-size: '20' is not a size; wanted a number with a unit"),
        (["--kv-size", "much"], "--kv-size: 'much' is not a size"),
        (["--kv-size", "1B"], "a KV cache of 1 bytes a token cannot be reached: the formats give"),
        (["--kv-size", "1MB"], "a KV cache of 1,000,000 bytes a token cannot be reached: the formats give"),
        (["--kv-size", "256B", "--kv", "int4"], "--kv names the formats of the KV cache, and --kv-size chooses them"),
        (["--kv-size", "256B", "--plot", "a.svg"], "--plot are for the formats of weights; pass --bits or --size, too"),
        ([], "pass a budget: --bits or --size for the weights, --kv-size for the KV cache, or both"),
    ],
)
def test_bad_budgets_get_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, *FEW, "-o", str(tmp_path / "scheme.toml")) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
