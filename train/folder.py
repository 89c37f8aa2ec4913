"""The folder of a training run: whether it may be used, its log, and the model that ends up in it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..errors import DiffbitError
from ..files import write_atomic
from ..models import Decoder, save
from ..quantize import Scheme
from ..quantize import save as save_quantized
from .checkpoint import FOLDER
from .qat import weights

LOG = "log.jsonl"
MASTER = "master"
METHOD = "qat"  # in the quantization_config of what comes out


def check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise DiffbitError unless a run may start (or resume) in `out`; touches nothing."""
    if out.is_file():
        raise DiffbitError(f"{out}: is a file, but the run's folder is to be written there; choose another name")
    if not out.is_dir() or not any(out.iterdir()):
        if resume:
            raise DiffbitError(f"{out}: holds no run to resume; start it without resume")
        return
    finished, ours = (out / "config.json").is_file(), (out / LOG).is_file()
    if resume and finished:
        raise DiffbitError(f"{out}: the run is through, there is nothing to resume; choose another folder")
    if not resume and not overwrite:
        hint = ", resume its run" if ours and not finished else ""
        raise DiffbitError(f"{out}: already exists and is not empty; choose another folder{hint}, or pass --overwrite")
    if not ours:
        raise DiffbitError(f"{out}: holds no {LOG}, so it is no training run's folder; choose another folder")


def begin_run(out: Path) -> None:
    """An empty run folder; what an earlier run left there goes (`check_folder` has made sure that it is one)."""
    out.mkdir(parents=True, exist_ok=True)
    for entry in out.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (out / LOG).touch()


def read_log(out: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that a killed run left half written is not one."""
    path = Path(out) / LOG
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise DiffbitError(f"{path}: line {number} is not valid JSON; restore the file") from None
    return rows


def rewind_log(out: Path, step: int) -> None:
    """Forget what was logged after `step`: a resumed run logs it again."""
    rows = [row for row in read_log(out) if row["step"] <= step]
    with write_atomic(out / LOG) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def place_model(model: Decoder, out: Path, tokenizer: Path, scheme: Scheme | None) -> None:
    """Save the trained model into `out` and drop what only the run needed. config.json comes last: with it, the
    folder is a whole model. One trained for a scheme is saved quantized, its float weights in the folder MASTER."""
    folder = out / ".model"
    shutil.rmtree(folder, ignore_errors=True)
    if scheme is None:
        save(model, folder, dtype=torch.float32, tokenizer_from=tokenizer)
    else:
        save_quantized(weights(model), folder, model.config, scheme, method=METHOD, tokenizer_from=tokenizer)
        save(model, folder / MASTER, dtype=torch.float32, tokenizer_from=tokenizer)
    # Of a run that was killed right here: a folder cannot replace one that holds something
    shutil.rmtree(out / MASTER, ignore_errors=True)
    for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, out / file.name)
    for leftover in (folder, tokenizer, out / FOLDER):
        shutil.rmtree(leftover, ignore_errors=True)
