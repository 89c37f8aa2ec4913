"""Training checkpoints: everything that the next step depends on, in safetensors and JSON.

    checkpoints/step-00000500/
        config.json, model.safetensors, tokenizer files     a model folder like any other
        optimizer.safetensors    <parameter>.exp_avg, <parameter>.exp_avg_sq (fp32); <parameter>.value of parameters
                                 that the saved model lacks: learned scales (qat.py), and the weight of a head norm,
                                 which is folded into o_proj (head_norm.py)
        training.json            step, the run's options, the hash of its text, number of processes; the hashes of the
                                 other files, of the log up to this step, and of itself

A checkpoint is written under a temporary name and renamed when complete; then the previous one is deleted, so that a
run killed at any moment leaves a complete one. A checkpoint that was changed is refused. The learning rate and the rows
depend only on the step's number and nothing else is random, so there is no random state to save.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ..errors import DiffbitError
from ..files import check_sha256, new_folder, read_sealed, sha256_file, write_sealed
from ..models import Decoder, load, save
from ..models.checkpoint.names import shapes
from ..models.checkpoint.safetensors_file import read_header, write_tensors
from .head_norm import folded

MOMENTS = ("exp_avg", "exp_avg_sq")
FOLDER = "checkpoints"
ANEW = "start the run anew with overwrite"


def save_checkpoint(
    out: Path, model: Decoder, optimizer: torch.optim.Optimizer, tokenizer: Path, training: dict[str, Any]
) -> None:
    """Write the checkpoint after `training["step"]` steps of the run in `out`, then delete earlier ones."""
    folder = out / FOLDER / f"step-{training['step']:08}"
    tensors, saved = {}, folded(model)
    stored = dict(saved.named_parameters())
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            tensors[f"{name}.{moment}"] = optimizer.state[parameter][moment].detach().cpu().contiguous()
        if name not in shapes(model.config) or stored.get(name) is not parameter:
            tensors[f"{name}.value"] = parameter.detach().cpu().contiguous()
    with new_folder(folder, overwrite=True) as temporary:
        save(saved, temporary, dtype=torch.float32, tokenizer_from=tokenizer)
        write_tensors(temporary / "optimizer.safetensors", tensors)
        hashes = {file.name: sha256_file(file) for file in sorted(temporary.iterdir())}
        write_sealed(temporary / "training.json", {**training, "files": hashes})
    for other in (out / FOLDER).iterdir():  # earlier ones, and unfinished ones of killed runs
        if other != folder and other.is_dir():
            shutil.rmtree(other)


def last_checkpoint(out: Path) -> Path:
    """Return the newest complete checkpoint of the run in `out`. Raises DiffbitError if there is none."""
    found = sorted((out / FOLDER).glob("step-*")) if (out / FOLDER).is_dir() else []
    if not found:
        raise DiffbitError(f"{out}: holds no checkpoint to resume from; start the run without resume")
    return found[-1]


def read_training(folder: Path) -> dict[str, Any]:
    """training.json of a checkpoint. Raises DiffbitError if any of the checkpoint's files is not as it was written."""
    training = read_sealed(folder / "training.json", ANEW)
    for name, sha256 in training["files"].items():
        check_sha256(folder / name, sha256, ANEW)
    return training


def restore(folder: Path, step: int, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint that `read_training` has checked, of this step, into model and optimizer, in place."""
    model.load_state_dict(load(folder).state_dict(), strict=False)
    file = folder / "optimizer.safetensors"
    tensors = {name: entry.read() for name, entry in read_header(file).items()}
    for name, parameter in model.named_parameters():
        moments = {moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS}
        if (value := tensors.get(f"{name}.value")) is not None:
            with torch.no_grad():
                parameter.copy_(value)
        counter = torch.tensor(float(step), device=parameter.device)  # as fused AdamW counts: in fp32
        optimizer.state[parameter] = {"step": counter, **moments}
