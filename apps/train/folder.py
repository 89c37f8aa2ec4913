"""The folder of a training run: its checks, log, loss curves, and trained model."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...io import durable
from ...io.drawing import COLORS, POINTS, Chart, Line, write_charts
from ...io.errors import DiffbitError
from ...io.files import make_folder, parse_json, write_atomic
from ...models import Decoder, save
from ...quantize import Scheme
from ...quantize import save as save_quantized
from .checkpoint import ANEW, FOLDER
from .head_norm import folded
from .qat import weights

LOG = "log.jsonl"
MASTER = "master"
ADAPTER = "adapter"
METHOD = "qat"  # in the quantization_config of the trained model


def check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise DiffbitError unless a run can start (or resume) in `out`. Changes nothing."""
    if out.is_file():
        raise DiffbitError(f"{out}: is a file, wanted a folder for the run; choose another name")
    if not out.is_dir() or not any(out.iterdir()):
        if resume:
            raise DiffbitError(f"{out}: holds no run to resume; start it without --resume")
        return
    finished, ours = (out / "config.json").is_file(), (out / LOG).is_file()
    if resume and finished:
        raise DiffbitError(f"{out}: the run has finished, so there is nothing to resume; choose another folder")
    if not resume and not overwrite:
        hint = ", resume its run" if ours and not finished else ""
        raise DiffbitError(f"{out}: already exists and is not empty; choose another folder{hint}, or pass --overwrite")
    if not ours:
        raise DiffbitError(f"{out}: holds no {LOG}, so it is not the folder of a training run; choose another folder")


def begin_run(out: Path) -> None:
    """Make `out` an empty run folder. Deletes an earlier run there (`check_folder` has checked that it is one)."""
    make_folder(out)
    # delete the log last: if we are killed here, the log still marks the rest as a run's folder
    for entry in sorted(out.iterdir(), key=lambda entry: entry.name == LOG):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (out / LOG).touch()


def read_log(out: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without a last line that a killed run did not finish. Raises DiffbitError for a
    log that cannot be read."""
    path = Path(out) / LOG
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_json(line.encode(), f"{path}: line {number}"))
        except DiffbitError:
            if number < len(lines):
                raise
    return rows


def log_state(out: Path) -> dict[str, Any]:
    """Sync the log to disk and return its size and hash, for `rewind_log`."""
    durable.sync(out / LOG)
    data = (out / LOG).read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def rewind_log(out: Path, state: Mapping[str, Any]) -> None:
    """Delete the lines after a `log_state`; a resumed run writes them again. Raises DiffbitError if others differ."""
    data = (out / LOG).read_bytes()[: state["bytes"]]
    if hashlib.sha256(data).hexdigest() != state["sha256"]:
        raise DiffbitError(f"{out / LOG}: was changed since it was written; restore the file, or {ANEW}")
    with write_atomic(out / LOG) as temporary:
        temporary.write_bytes(data)


def plot_losses(logs: Mapping[str, list[dict[str, Any]]], path: str | Path) -> None:
    """Draw loss curves of the named logs (`read_log`), .png or .svg: the training loss, raw and averaged over 20
    steps, the evaluation loss, and the loss on the needles' answers averaged over 20 steps."""
    lines = []
    for index, (name, log) in enumerate(logs.items()):
        look = {"color": COLORS[index % len(COLORS)], "marker": "", "linestyle": "-"}
        training, answers, scored = (
            [(row["step"], row[key]) for row in log if key in row] for key in ("loss", "answer_loss", "eval_loss")
        )
        lines.append(Line("", training, look=look | {"alpha": 0.2, "linewidth": 0.8}))
        lines.append(Line(f"{name}, training", _smooth(training), look=look))
        if answers:
            lines.append(Line(f"{name}, needles' answers", _smooth(answers), look=look | {"linestyle": ":"}))
        if scored:
            lines.append(Line(f"{name}, held out", scored, look=look | POINTS | {"marker": "o", "markersize": 4}))
    write_charts(path, [Chart("", "step", "loss (nats per token)", lines)])


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the moving average over 20 steps, or over all if there are fewer."""
    steps, losses = zip(*points, strict=True)
    width = min(20, len(losses))
    return list(zip(steps[width - 1 :], np.convolve(losses, np.ones(width) / width, mode="valid"), strict=True))


def place_model(
    model: Decoder,
    out: Path,
    tokenizer: Mapping[str, bytes],
    scheme: Scheme | None,
    write_adapter: Callable[[Path], None] | None = None,
) -> None:
    """Save the trained model in `out` and delete the run's temporary files. config.json is written last: it marks the
    model as complete. A model trained for a scheme is saved quantized, with its float weights in the folder MASTER.
    write_adapter: writes the adapters that are merged into the model to a folder, ADAPTER."""
    folder = out / ".model"
    shutil.rmtree(folder, ignore_errors=True)
    if scheme is None:
        save(folded(model), folder, dtype=torch.float32, tokenizer_from=tokenizer)
    else:
        save_quantized(weights(model), folder, model.config, scheme, method=METHOD, tokenizer_from=tokenizer)
        save(model, folder / MASTER, dtype=torch.float32, tokenizer_from=tokenizer)
    if write_adapter is not None:
        write_adapter(folder / ADAPTER)
    for name in (MASTER, ADAPTER):
        # A run that was killed here may have left it, and os.replace cannot replace a folder that is not empty
        shutil.rmtree(out / name, ignore_errors=True)
    for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, out / file.name)
    durable.sync(out)
    for leftover in (folder, out / FOLDER):
        shutil.rmtree(leftover, ignore_errors=True)
