"""Commands that are killed, at each step that changes the disk and at any time: the same command again gives the same
bytes, nothing is left beside them, and at no moment is there neither the old output nor the new one."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from diffbit.apps.convert.write import convert
from diffbit.apps.evaluate.compare import compare
from diffbit.apps.train import trainer as trainer_module
from diffbit.apps.train.config import TrainConfig
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.apps.train.trainer import train
from diffbit.apps.web import site as web
from diffbit.apps.web.site import write_site
from diffbit.calib_data import Windows
from diffbit.calib_data.window import digest
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io import drawing
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, save
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize.methods import learned

from .points import killed_after, killed_at

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork and renameat2")]
TEXT = "def add(a, b):\n    return a + b\n" * 40
SCHEME = Scheme(weights=parse_format("int4_g32"), head=parse_format("int8"), embedding=parse_format("int8"))
IDS = torch.randint(0, 250, (3, 12), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Command:
    """run(folder of the models, output, is the output to be overwritten)."""

    run: Callable[[Path, Path, bool], object]
    every: int = 1  # of its steps, this one is tried
    same: tuple[str, ...] = ()  # files to compare; none: all
    whole: bool = True  # the output is there as a whole or not at all
    old: str = "old"  # of the models: the output that is overwritten


def quantized(method: str) -> Callable[[Path, Path, bool], object]:
    def run(models: Path, out: Path, overwrite: bool) -> None:
        calibration = None if method == "rtn" else IDS
        quantize_checkpoint(
            models / "float", out, SCHEME, method=method, calibration=calibration, overwrite=overwrite, resume=True
        )

    return run


def exported(models: Path, out: Path, overwrite: bool) -> None:
    export_artifact(models / "quantized", out, overwrite=overwrite)


def converted(models: Path, out: Path, overwrite: bool) -> None:
    convert(models / "plain", out, overwrite=overwrite)


def site(models: Path, out: Path, overwrite: bool) -> None:
    write_site(models / "artifact", out, slow=True, overwrite=overwrite)


def trained(models: Path, out: Path, overwrite: bool) -> None:
    """Go on where there is a checkpoint, as somebody would whose run was killed; else from the beginning."""
    config = TrainConfig(
        model=model(max_position=16), steps=3, length=8, batch_size=1, warmup=1, qat="ternary", device="cpu",
        source=str(models / "text.txt"), eval_windows=1, checkpoint_every=1,
    )  # fmt: skip
    if (out / "config.json").exists() and not overwrite:
        return  # it had ended
    try:
        train(config, out, resume=True)
    except DiffbitError:
        train(config, out, overwrite=True)


def compared(models: Path, out: Path, overwrite: bool) -> None:
    from diffbit.apps.evaluate.command import _write

    mask = torch.ones(IDS.shape, dtype=torch.bool).numpy()
    target = mask.copy()
    target[:, 0] = False
    ids = IDS.numpy()
    windows = Windows(ids, mask, target, digest(ids, mask, target), "x", ids.size, 0, 1)
    comparison = compare([models / "float"], windows, ["16", "8"], ["weights"])
    out.mkdir(exist_ok=True)
    _write(comparison, [], {}, out)


COMMANDS = {
    "rtn": Command(quantized("rtn")),
    "gptq": Command(quantized("gptq"), every=15),
    "learned": Command(quantized("learned"), every=40),
    "export": Command(exported, every=5),
    "convert": Command(converted),
    "web": Command(site, old="old site"),
    "train": Command(trained, 9, ("config.json", "model.safetensors", "master/model.safetensors"), False),
    "compare": Command(compared, 3, same=("comparison.json", "comparison.csv"), whole=False),  # the report says when
}  # fmt: skip


def model(**changes: Any) -> ModelConfig:
    options = {
        "vocab_size": 270, "hidden_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
        "intermediate_size": 16, "max_position": 32, "attention": "diff_v1",
    }  # fmt: skip
    return ModelConfig.uniform(**(options | changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_text(TEXT)
    train_tokenizer([TEXT], 270, folder / "tokenizer")
    torch.manual_seed(0)
    save(Decoder(model()), folder / "float", tokenizer_from=folder / "tokenizer")
    quantize_checkpoint(folder / "float", folder / "quantized", SCHEME)
    save(Decoder(model(attention="softmax")), folder / "plain", tokenizer_from=folder / "tokenizer")
    quantize_checkpoint(folder / "float", folder / "old", Scheme(weights=parse_format("int8")))
    export_artifact(folder / "quantized", folder / "artifact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web, "PACKAGES", ())
        write_site(folder / "artifact", folder / "old site", license="another", slow=True)
    (folder / "old" / "log.jsonl").touch()  # so that `train` takes it for a run of its own
    return folder


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("require_matplotlib", "plot_losses"):  # matplotlib would take most of the time
        monkeypatch.setattr(trainer_module, name, lambda *_: None)
    monkeypatch.setattr(web, "PACKAGES", ())  # npm brings them
    monkeypatch.setattr(drawing, "svg", lambda figure: "<svg></svg>")
    monkeypatch.setattr(
        learned, "METHOD", dataclasses.replace(learned.METHOD, round_layer=partial(learned.quantize_layer, steps=2))
    )


def content(folder: Path, names: tuple[str, ...] = ()) -> dict[str, bytes]:
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not names or name in names}


@dataclass
class Trial:
    command: Command
    models: Path
    place: Path
    overwrite: bool
    new: dict[str, bytes] = field(default_factory=dict)
    old: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out = self.place / "out"
        self.seconds = time.perf_counter()
        self.run()
        self.seconds = time.perf_counter() - self.seconds
        self.new, self.old = content(self.out), content(self.models / self.command.old)
        self.clean()

    def clean(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.overwrite:
            shutil.copytree(self.models / self.command.old, self.out)

    def run(self) -> None:
        self.command.run(self.models, self.out, self.overwrite)

    def check(self) -> None:
        """After it was killed: old or new, and the same command again gives the new."""
        if self.command.whole:
            allowed = [self.new, self.old] if self.overwrite else [self.new, {}]
            assert content(self.out) in allowed
        over = not self.overwrite and self.out.exists() and self.command.whole
        with pytest.raises(DiffbitError, match="already exists") if over else nullcontext():
            self.run()
        names = self.command.same
        expected = {name: data for name, data in self.new.items() if not names or name in names}
        assert content(self.out, names) == expected
        left = {path.name for path in self.place.iterdir()} - {"out"}
        ended = over or not self.command.whole  # then the same command does nothing, or nothing more
        assert not left or (ended and all(name.startswith((".out.", "out.unf")) for name in left)), "something is left"
        for name in left:
            path = self.place / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.clean()


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_each_step(name: str, overwrite: bool, models: Path, tmp_path: Path) -> None:
    if name == "compare" and overwrite:
        return
    trial = Trial(COMMANDS[name], models, tmp_path, overwrite)
    random, step = Random(name), 0
    while killed_at(step, trial.run):
        trial.check()
        step += 1 if trial.command.every == 1 else random.randint(1, 2 * trial.command.every - 1)
    assert step > 4
    trial.clean()


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_time(name: str, models: Path, tmp_path: Path) -> None:
    trial, random = Trial(COMMANDS[name], models, tmp_path, overwrite=name != "compare"), Random(name)
    for _ in range(4):
        if killed_after(random.random() * trial.seconds, trial.run):
            trial.check()
        else:
            trial.clean()
