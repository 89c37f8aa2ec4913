"""Training checkpoints: all that the next step depends on, in safetensors and JSON.

    checkpoints/step-00000500/
        config.json, model.safetensors, tokenizer files     a model folder like any other
        optimizer.safetensors    <parameter>.exp_avg, <parameter>.exp_avg_sq (fp32); <parameter>.value of parameters
                                 that exist in training only: learned scales (qat.py)
        training.json            step, the run's options, the hash of its text, number of processes

A checkpoint is written under a temporary name and renamed when complete; then the one before is deleted: a run that is
killed at any moment leaves a whole one. The learning rate and the rows are functions of the step's number and nothing
else is random, so there is no random state to save.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import DiffbitError
from ..files import new_folder, read_json, write_json
from ..models import Decoder, load, save
from ..models.checkpoint.names import shapes
from ..models.checkpoint.safetensors_file import write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
FOLDER = "checkpoints"


def save_checkpoint(
    out: Path, model: Decoder, optimizer: torch.optim.Optimizer, tokenizer: Path, training: dict[str, Any]
) -> None:
    """Write the checkpoint after `training["step"]` steps of the run in `out`, then delete earlier ones."""
    folder = out / FOLDER / f"step-{training['step']:08}"
    tensors = {}
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            tensors[f"{name}.{moment}"] = optimizer.state[parameter][moment].detach().cpu().contiguous()
        if name not in shapes(model.config):
            tensors[f"{name}.value"] = parameter.detach().cpu().contiguous()
    with new_folder(folder, overwrite=True) as temporary:
        save(model, temporary, dtype=torch.float32, tokenizer_from=tokenizer)
        write_tensors(temporary / "optimizer.safetensors", tensors)
        write_json(temporary / "training.json", training)
    for other in (out / FOLDER).iterdir():  # earlier ones, and what a killed run left half written
        if other != folder:
            shutil.rmtree(other)


def last_checkpoint(out: Path) -> Path:
    """The newest whole checkpoint of the run in `out`. Raises DiffbitError if there is none."""
    found = sorted((out / FOLDER).glob("step-*")) if (out / FOLDER).is_dir() else []
    if not found:
        raise DiffbitError(f"{out}: holds no checkpoint to resume from; start the run without resume")
    return found[-1]


def restore(folder: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint into model and optimizer, in place; its step. Raises DiffbitError for a damaged one."""
    model.load_state_dict(load(folder).state_dict(), strict=False)
    file = folder / "optimizer.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DiffbitError(f"{file}: cannot be read ({error}); restore the file or start the run anew") from None
    try:
        step = int(read_json(folder / "training.json")["step"])
        for name, parameter in model.named_parameters():
            moments = {moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS}
            if any(moment.shape != parameter.shape for moment in moments.values()):
                raise DiffbitError(f"{file}: the moments of {name} do not have its shape {list(parameter.shape)}")
            if name not in shapes(model.config):
                with torch.no_grad():
                    parameter.copy_(tensors[f"{name}.value"])
            counter = torch.tensor(float(step), device=parameter.device)  # as fused AdamW counts: in fp32
            optimizer.state[parameter] = {"step": counter, **moments}
        return step
    except KeyError as error:
        raise DiffbitError(f"{folder}: lacks {error}; restore the file or start the run anew") from None
