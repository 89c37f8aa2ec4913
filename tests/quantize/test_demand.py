"""What a run is predicted to take, and runs that are to take little."""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffbit import models
from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.export.demand import export_demand
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.quantize import Scheme, demand, quantize_checkpoint
from diffbit.quantize.demand import Demand
from diffbit.quantize.methods import parse_recipe

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
    quantize_checkpoint(model, out, SCHEME, calibration=ids, **options)


def peak(action: Callable[[], object], before: Callable[[], object]) -> int:
    """Bytes that a child takes at most beside what it has after `before`, which makes its code resident."""

    def run() -> None:
        before()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would be used again, unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        begin = demand.resident()
        action()
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        print(int(line.split()[1]) * 1024 - begin, file=sys.stderr)

    done = forks.run(run)
    assert done.code == 0, done.error
    return int(done.error.split()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_states_on_the_disk(model: Path, tmp_path: Path) -> None:
    """They are not in memory, by what is resident; and the result is the same to the bit."""
    recipe, text = parse_recipe("rtn"), demand.Text(WINDOWS, LENGTH, 128)
    least = demand.quantize_demand(Checkpoint(model), SCHEME, recipe, text, spilled=True).memory
    with pytest.raises(DiffbitError, match=r"--max-memory is .* GB, but .* takes about .*; allow that much"):
        quantize(model, tmp_path / "q", max_memory=demand.resident() + least // 2)
    assert list(tmp_path.iterdir()) == []

    def before() -> None:
        quantize(model, tmp_path / "small", windows=8)
        shutil.rmtree(tmp_path / "small")

    whole = peak(lambda: quantize(model, tmp_path / "whole"), before)

    def within() -> None:
        # a fork's resident memory grows by what it touches of its parent's, so the limit is on what the run adds
        demand.resident = lambda: 0
        quantize(model, tmp_path / "small", max_memory=int(demand.MARGIN * least) + (24 << 20))

    small = peak(within, before)
    assert small < least < whole and whole - small > 1.5 * STATES, (small, least, whole, STATES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "whole"]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "small" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_limit_of_the_address_space(model: Path, tmp_path: Path) -> None:
    """With --max-memory a run stays within a limit that the system enforces, in which it would fail without."""
    windows = 2 * WINDOWS
    text = demand.Text(windows, LENGTH, 128)
    least = demand.quantize_demand(Checkpoint(model), SCHEME, parse_recipe("rtn"), text, spilled=True).memory

    def run(name: str, **options: Any) -> forks.Done:
        def limited() -> None:
            demand.resident = lambda: 0
            quantize(model, tmp_path / name / "q", windows, **options)

        return forks.run(limited, memory=least)

    failed = run("without")
    assert failed.code == forks.RAISED and "memory" in failed.error
    done = run("within", max_memory=int(demand.MARGIN * least) + 1)
    assert done.code == 0, done.error
    assert [path.name for path in (tmp_path / "within").iterdir()] == ["q"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_run_on_the_disk_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its states in memory, and the other way round: the file between them is the same."""
    ids = torch.randint(96, (40, LENGTH), generator=torch.Generator().manual_seed(0))

    def run(out: str, spills: bool, **options: Any) -> None:
        monkeypatch.setattr("diffbit.quantize.checkpoint.within", lambda *_: (Demand(0, 0, 0), spills))
        quantize_checkpoint(model, tmp_path / out, SCHEME, method="gptq", calibration=ids, **options)

    run("whole", False)
    from diffbit.quantize.resume import Unfinished

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
    monkeypatch.setattr(demand, "available_memory", lambda: 10**5)
    for what, run in (
        ("quantizing", lambda: quantize_checkpoint(model, tmp_path / "q", SCHEME)),
        ("exporting", lambda: export_artifact(quantized, tmp_path / "a")),
    ):
        with pytest.raises(DiffbitError, match=rf"{what} .* GB of memory, but 0\.0 GB are free; use a machine"):
            run()
    monkeypatch.setattr(demand, "available_memory", lambda: None)
    monkeypatch.setattr(demand.shutil, "disk_usage", lambda folder: demand.shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(DiffbitError, match=r"writes about .* GB to .*; choose another disk"):
        quantize_checkpoint(model, tmp_path / "q", SCHEME)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_what_is_written(
    quantized: Path, artifact: Path, checkpoint: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.iterdir())

    scheme = Scheme(weights=parse_format("int4_g32"))
    found = demand.quantize_demand(Checkpoint(checkpoint), scheme, parse_recipe("rtn"), None)
    assert found.output == pytest.approx(size(quantized), rel=0.15) and found.disk == found.output
    assert export_demand(Checkpoint(quantized)).output == pytest.approx(size(artifact), rel=0.15)
    assert export_demand(Checkpoint(checkpoint), scheme=scheme).output == export_demand(Checkpoint(quantized)).output
    for name in ("diff_v1", "diff_v2", "softmax"):
        written = size(export_artifact(trained(name), tmp_path / name))
        assert export_demand(Checkpoint(trained(name))).output == pytest.approx(written, rel=0.15)


def test_plan(checkpoint: Path, quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stopped:
            main(["plan", *arguments, "--json"])
        printed = capsys.readouterr()
        assert stopped.value.code == 0, printed.err
        return dict(json.loads(printed.out))["steps"]

    floats = ["--embedding", "none", "--head", "none"]
    both = plan(str(checkpoint), "--weights", "int4_g32", *floats, "--method", "gptq")
    assert list(both) == ["quantize", "export"] and not both["quantize"]["hidden_states_on_disk"]
    assert all(step["memory"] > 10**8 and step["disk"] >= step["output"] > 10**4 for step in both.values())
    (step,) = plan(str(quantized)).items()
    assert step[0] == "export" and step[1]["output"] == both["export"]["output"]


@pytest.mark.parametrize("odd", [["--length", "100000"], ["--length", "1"], ["--max-windows", "0"]])
def test_plan_refuses_what_quantize_refuses(checkpoint: Path, odd: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(checkpoint), "--weights", "int4_g32", "--method", "gptq", *odd])
    assert stopped.value.code == 2


def test_files_in_the_cache_are_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts what the system has read of files, and drops when it must."""
    numbers = {"max": "1000000", "current": "990000", "stat": "anon 90000\nactive_file 500000\ninactive_file 400000\n"}
    for name, text in numbers.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(demand, "GROUP", tmp_path)
    assert demand.available_memory() == 910_000
