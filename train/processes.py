"""Processes of a training run, one or several under torchrun: rank, device, and which one writes the files."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import DiffbitError


@dataclass(frozen=True)
class Processes:
    """This process and the number of all."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.count > 1:
            dist.barrier()


def processes(device: str) -> Processes:
    """Join the process group that torchrun's environment describes, if any.

    `device` is auto, cpu or cuda; each process takes the GPU of its local rank. Raises DiffbitError where there is no
    such GPU. A process leaves the group when it ends: a second group, formed for a second run in the same processes,
    would wait for ever.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DiffbitError("device cuda was asked for, but torch sees no CUDA GPU; pass cpu, or install a CUDA torch")
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    rank, local = (int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))) if count > 1 else (0, 0)
    if on_gpu and local >= torch.cuda.device_count():
        raise DiffbitError(
            f"process {local} has no GPU of its own: this machine has {torch.cuda.device_count()}; "
            "start as many processes as there are GPUs"
        )
    here = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(here)
    if count > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
        atexit.register(dist.destroy_process_group)
    return Processes(rank, count, here)
