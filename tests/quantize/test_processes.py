"""Quantizing by several processes: the same bytes as by one, who writes, and how a run ends when one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import diffbit
from diffbit import models
from diffbit.cli.app import main
from diffbit.formats import parse_format
from diffbit.io import processes
from diffbit.io.errors import DiffbitError
from diffbit.io.processes import Processes
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize.calibration import rounds as stages
from diffbit.quantize.calibration import states, stats
from diffbit.quantize.resume import Unfinished

from .. import forks
from ..configs import resized

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork, and torch.distributed by gloo")
INT4 = parse_format("int4_g32")
CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=72,
    attention="diff_v1", tie_embeddings=True,
)  # fmt: skip
KINDS = {
    "diff_v1": CONFIG,
    "softmax": resized(CONFIG, attention="softmax", tie_embeddings=False, mlp_bias=True),
    "diff_v2": resized(CONFIG, attention="diff_v2", sub_norms=True),
}
IDS = torch.randint(96, (7, 20), generator=torch.Generator().manual_seed(0))  # four batches of two windows, one shorter
MASK = torch.arange(20) < torch.tensor([20, 20, 7, 20, 13, 0, 20])[:, None]
CASES = (
    ("diff_v1", "rtn", None),
    ("diff_v2", "rtn", IDS),
    ("diff_v1", "gptq", IDS),
    ("diff_v2", "guided", IDS),
    ("diff_v2", "awq", IDS),
    ("softmax", "learned:3", IDS),
)
MORE = (
    ("softmax", "rotate+gptq", IDS),
    ("softmax", "hqq", None),
    ("diff_v2", "learned:3", IDS),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in KINDS.items():
        torch.manual_seed(0)
        models.save(Decoder(config), folder / name, dtype=torch.bfloat16)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, parts of weights and blocks of Gram matrices, even of a miniature."""
    monkeypatch.setattr(states, "BATCH_TOKENS", 40)
    monkeypatch.setattr(stages, "ROWS", 40)
    monkeypatch.setattr(stats, "BLOCK", 20)
    monkeypatch.setattr(stats, "ROWS", 20)


def together(count: int, action: Callable[[Processes], object]) -> list[int]:
    return forks.together(count, lambda: action(processes.processes("cpu")))


def quantize(source: Path, output: Path, method: str, ids: Any, **options: Any) -> dict[str, Any]:
    config = models.Checkpoint(source).config
    scheme = Scheme(weights=INT4, embedding=INT4, head=INT4 if config.tie_embeddings else parse_format("int8"))
    mask = None if ids is None else MASK
    options = {"method": method, "calibration": ids, "calibration_mask": mask, **options}
    return quantize_checkpoint(source, output, scheme, **options).to_dict()


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["", "more"])
def test_the_same_bytes_as_one_process(cases: Any, sources: Path, tmp_path: Path) -> None:
    """And the same report; every process is told all of it, and the first alone writes."""

    def run(workers: Processes) -> None:
        for kind, method, ids in cases:
            folder = tmp_path / str(workers.rank) / f"{kind}-{method}"
            report = quantize(sources / kind, folder, method, ids, workers=workers)
            (tmp_path / f"{workers.rank}-{kind}-{method}.json").write_text(json.dumps(report))

    assert together(2, run) == [0, 0]
    assert [path.name for path in (tmp_path / "0").iterdir()] and not (tmp_path / "1").exists()
    for kind, method, ids in cases:
        report = quantize(sources / kind, tmp_path / "one" / f"{kind}-{method}", method, ids)
        assert content(tmp_path / "0" / f"{kind}-{method}") == content(tmp_path / "one" / f"{kind}-{method}"), method
        for rank in (0, 1):
            assert json.loads((tmp_path / f"{rank}-{kind}-{method}.json").read_text()) == json.loads(json.dumps(report))


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_states_on_the_disk(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three, of which one has nothing to do at the end; what was finished by one is theirs too."""
    quantize(sources / "diff_v1", tmp_path / "one", "gptq", IDS)
    add = Unfinished.add

    def stops(self: Unfinished, layer: Any) -> None:
        if self.count == 2:
            raise KeyboardInterrupt
        add(self, layer)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Unfinished, "add", stops)
        quantize(sources / "diff_v1", tmp_path / "three", "gptq", IDS)
    monkeypatch.setattr("diffbit.quantize.checkpoint.must_spill", lambda *_: True)

    def run(workers: Processes) -> object:
        return quantize(sources / "diff_v1", tmp_path / "three", "gptq", IDS, workers=workers, resume=True)

    assert together(3, run) == [0, 0, 0]
    assert content(tmp_path / "three") == content(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three"]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_sentence_when_a_process_fails(failing: int, sources: Path, tmp_path: Path) -> None:
    """Exit code 2 of each, one of them speaks, and nothing is left."""
    messages = [tmp_path / f"{rank}.txt" for rank in (0, 1)]

    def run(workers: Processes) -> None:
        sys.stderr = open(messages[workers.rank], "w")  # noqa: SIM115
        exact = stages.quantize_weight

        def fails(*arguments: Any) -> Any:
            if workers.rank == failing:
                raise DiffbitError("the disk of this machine is on fire")
            return exact(*arguments)

        stages.quantize_weight = fails
        model, out = str(sources / "diff_v1"), str(tmp_path / "out" / "q")
        main(["quantize", model, "--weights", "int4_g32", "--method", "hqq", "-o", out])

    assert together(2, run) == [2, 2]
    assert messages[failing].read_text() == "error: the disk of this machine is on fire\n"
    assert messages[1 - failing].read_text() == ""
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_torchrun(trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself: one result on stdout, and no second bar, remark or file."""
    monkeypatch.undo()  # of `small`: the one process has the sizes that the others have
    root = str(Path(diffbit.__file__).parents[1])
    arguments = ["quantize", str(trained("diff_v1")), "--weights", "int4_g32", "--method", "gptq", "--json"]
    arguments += ["--max-windows", "3", "--length", "32", "-o"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    one = forks.run(lambda: main([*arguments, str(tmp_path / "one")]))
    two = subprocess.run(
        [*torchrun, "diffbit", *arguments, str(tmp_path / "two")],
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (one.code, two.returncode) == (0, 0), one.error + two.stderr
    assert one.error.count("is calibrated on mix") == two.stderr.count("is calibrated on mix") == 1
    unlike = dict.fromkeys(("output", "seconds", "quality"))  # the quality is a sum in another order
    results = [json.loads(output) | unlike for output in (one.output, two.stdout)]
    assert results[0] == results[1]
    assert content(tmp_path / "one") == content(tmp_path / "two")
