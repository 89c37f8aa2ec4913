"""What a run takes at most is known before it starts, and --max-memory is kept."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit import models
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io import resources
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.quantize import Scheme, forecast, quantize_checkpoint, resolve
from diffbit.quantize.forecast import quantize_demand
from diffbit.quantize.methods import parse_recipe
from diffbit.quantize.resume import Unfinished

from .. import forks

SCHEME = Scheme(weights=parse_format("int4_g32"), head=parse_format("int8"), embedding=parse_format("int8"))
WINDOWS, LENGTH = 2048, 64
STATES = 4 * WINDOWS * LENGTH * 64  # bytes of hidden states


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "float"
    config = ModelConfig.uniform(
        vocab_size=96, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64,
        attention="diff_v1", max_position=LENGTH,
    )  # fmt: skip
    models.save(Decoder(config), folder)
    return folder


def quantize(model: Path, out: Path, windows: int = WINDOWS, **options: Any) -> None:
    ids = torch.randint(96, (windows, LENGTH), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(model, out, SCHEME, method="hqq", calibration=ids, **options)


def peak(action: Callable[[], object], before: Callable[[], object]) -> int:
    """Bytes that a child takes at most beside what it has after `before`, which makes its code resident."""

    def run() -> None:
        before()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would be used again, unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        begin = resources.resident_memory()
        action()
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        print(int(line.split()[1]) * 1024 - begin, file=sys.stderr)

    done = forks.run(run)
    assert done.code == 0, done.error
    return int(done.error.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_states_on_the_disk_take_no_memory(model: Path, tmp_path: Path) -> None:
    """They are not in memory, by what is resident; and the result is the same to the bit."""
    source = Checkpoint(model)
    least = quantize_demand(
        source, resolve(source.config, SCHEME), parse_recipe("hqq"), (WINDOWS, LENGTH), spilled=True
    ).memory
    with pytest.raises(DiffbitError, match=r"--max-memory is .* GB, but .* takes about .*; allow that much"):
        quantize(model, tmp_path / "q", max_memory=resources.resident_memory() + least // 2)
    assert list(tmp_path.iterdir()) == []

    def before() -> None:
        quantize(model, tmp_path / "small", windows=8)
        shutil.rmtree(tmp_path / "small")

    whole = peak(lambda: quantize(model, tmp_path / "whole"), before)

    def within() -> None:
        # a fork's resident memory grows by what it touches of its parent's, so the limit is on what the run adds
        forecast.resident_memory = lambda: 0
        quantize(model, tmp_path / "small", max_memory=int(forecast.MARGIN * least) + (24 << 20))

    small = peak(within, before)
    assert small < least < whole and whole - small > 1.5 * STATES, (small, least, whole, STATES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "whole"]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "small" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_weighing_tokens_takes_the_whole_model_and_a_window(tmp_path: Path) -> None:
    """Here mostly the predictions: 512 tokens of 20,000 words, six times."""
    config = ModelConfig.uniform(
        vocab_size=20_000, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64,
        attention="diff_v1", max_position=512,
    )  # fmt: skip
    torch.manual_seed(0)
    models.save(Decoder(config), tmp_path / "float")
    ids = torch.randint(96, (2, 512), generator=torch.Generator().manual_seed(0))

    def run(name: str, windows: Tensor) -> None:
        quantize_checkpoint(tmp_path / "float", tmp_path / name, SCHEME, method="guided", calibration=windows)

    source = Checkpoint(tmp_path / "float")
    memory = {
        method: quantize_demand(source, resolve(source.config, SCHEME), parse_recipe(method), (2, 512)).memory
        for method in ("gptq", "guided")
    }
    taken = peak(lambda: run("whole", ids), lambda: run("small", ids[:, :8]))
    assert memory["gptq"] < taken < memory["guided"] < 2 * taken, (memory, taken)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_run_stays_within_max_memory(model: Path, tmp_path: Path) -> None:
    """With --max-memory a run stays within a limit that the system enforces, in which it would fail without."""
    windows = 2 * WINDOWS
    source = Checkpoint(model)
    least = quantize_demand(
        source, resolve(source.config, SCHEME), parse_recipe("rtn"), (windows, LENGTH), spilled=True
    ).memory

    def run(name: str, **options: Any) -> forks.Done:
        def limited() -> None:
            forecast.resident_memory = lambda: 0
            quantize(model, tmp_path / name / "q", windows, **options)

        return forks.run(limited, memory=least)

    failed = run("without")
    assert failed.code == forks.RAISED and "memory" in failed.error
    done = run("within", max_memory=int(forecast.MARGIN * least) + 1)
    assert done.code == 0, done.error
    assert [path.name for path in (tmp_path / "within").iterdir()] == ["q"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_run_on_the_disk_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its states in memory, and the other way round: the file between them is the same."""
    ids = torch.randint(96, (40, LENGTH), generator=torch.Generator().manual_seed(0))

    def run(out: str, spills: bool, **options: Any) -> None:
        monkeypatch.setattr("diffbit.quantize.checkpoint.must_spill", lambda *_: spills)
        quantize_checkpoint(model, tmp_path / out, SCHEME, method="gptq", calibration=ids, **options)

    run("whole", False)
    add = Unfinished.add

    def stops(self: Unfinished, layer: Any) -> None:
        if self.count == 2:
            raise KeyboardInterrupt
        add(self, layer)

    for spills in (True, False):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Unfinished, "add", stops)
            run("q", spills, overwrite=True)
        run("q", not spills, resume=True, overwrite=True)
        for file in (tmp_path / "whole").iterdir():
            assert (tmp_path / "q" / file.name).read_bytes() == file.read_bytes()


def test_what_cannot_fit_is_refused(
    model: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "available_memory", lambda: 10**5)
    for what, run in (
        ("quantizing", lambda: quantize_checkpoint(model, tmp_path / "q", SCHEME)),
        ("exporting", lambda: export_artifact(quantized, tmp_path / "a")),
    ):
        with pytest.raises(DiffbitError, match=rf"{what} .* kB of memory, but 100\.0 kB are free; use a machine"):
            run()
    monkeypatch.setattr(resources, "available_memory", lambda: None)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda folder: resources.shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(DiffbitError, match=r"writes about .* kB to .*, but 1 bytes are free there"):
        quantize_checkpoint(model, tmp_path / "q", SCHEME)
    assert list(tmp_path.iterdir()) == []
