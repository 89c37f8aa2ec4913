"""Training checkpoints hold everything that the next step depends on, in safetensors and JSON.

    checkpoints/step-00000500/
        config.json, model.safetensors, tokenizer files     a model folder like any other
        optimizer.safetensors    <parameter>.<key>: the tensors of the optimizer's state (adamw: exp_avg, exp_avg_sq;
                                 adamw8bit: state1, state2, and absmax1, absmax2, qmap1, qmap2 if they have 8 bits);
                                 <parameter>.value: parameters that the saved model does not have: learned scales
                                 and adapters (qat.py), and the weight of a head norm, which is folded into o_proj
                                 (head_norm.py)
        training.json            step, the run's options, hash of its text, number of processes; hashes of the other
                                 files, of the log up to this step, and of itself

A checkpoint is written under a temporary name and renamed when it is complete; then the previous one is deleted, so a
run that is killed at any moment leaves a complete checkpoint. A checkpoint that was changed raises an error. The
learning rate and the rows depend only on the number of the step, and nothing else is random, so no random state is
saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...io.errors import DiffbitError
from ...io.files import check_sha256, new_folder, read_sealed, sha256_file, write_sealed
from ...io.safetensors import read_header, write_tensors
from ...models import Decoder, load, save
from ...models.checkpoint import shapes
from .head_norm import folded

FOLDER = "checkpoints"
ANEW = "start the run again with --overwrite"


def save_checkpoint(
    out: Path,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    tokenizer: Mapping[str, bytes],
    training: dict[str, Any],
) -> None:
    """Write the checkpoint after step `training["step"]` of the run in `out`, then delete earlier ones. tokenizer: its
    files by name."""
    folder = out / FOLDER / f"step-{training['step']:08}"
    tensors, saved = {}, folded(model)
    stored = dict(saved.named_parameters())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():  # none for a frozen parameter
            if key != "step":  # bitsandbytes' tables qmap1 and qmap2 are shared, which safetensors rejects: copy them
                value = value.clone() if key.startswith("qmap") else value.detach()
                tensors[f"{name}.{key}"] = value.cpu().contiguous()
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
    checkpoints = sorted((out / FOLDER).glob("step-*")) if (out / FOLDER).is_dir() else []
    if not checkpoints:
        raise DiffbitError(f"{out}: holds no checkpoint to resume from; start the run without --resume")
    return checkpoints[-1]


def read_training(folder: Path) -> dict[str, Any]:
    """Read training.json of a checkpoint. Raises DiffbitError if any of the checkpoint's files was changed."""
    training = read_sealed(folder / "training.json", ANEW)
    for name, sha256 in training["files"].items():
        check_sha256(folder / name, sha256, ANEW)
    return training


def restore(folder: Path, step: int, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint of a step, which `read_training` has checked, into model and optimizer in place."""
    model.load_state_dict(load(folder).state_dict(), strict=False)
    file = folder / "optimizer.safetensors"
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in read_header(file).items():
        owner, _, key = name.rpartition(".")
        tensors.setdefault(owner, {})[key] = entry.read()
    fused = isinstance(optimizer, torch.optim.AdamW)  # it counts steps in an fp32 tensor, bitsandbytes in an int
    for name, parameter in model.named_parameters():
        state = {key: value.to(parameter.device) for key, value in tensors.get(name, {}).items()}
        if (value := state.pop("value", None)) is not None:  # a frozen one, too: an o_proj folded with a trained gain
            with torch.no_grad():
                parameter.copy_(value)
        if parameter.requires_grad:
            counter = torch.tensor(float(step), device=parameter.device) if fused else step
            optimizer.state[parameter] = {"step": counter, **state}
