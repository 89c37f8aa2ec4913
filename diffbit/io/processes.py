"""Runs of several processes, started by torchrun: the rank of this process, sharing of work and results, and the end of
a run in which a process fails.

torchrun starts the same command many times, on one machine or on several. All processes go through the same work in the
same order. `share` divides a list of items among them and gives every process all the results, in the order of the
items, so a sum over the results equals that of a single process, bit for bit. The first process (rank 0) writes files,
shows progress and prints messages.

A process that fails prints its error and closes its connections. Then the other processes' exchanges with it fail, and
they end silently. torchrun kills all processes when one has ended, so the others wait until the first has cleaned up.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import DiffbitError
from .progress import is_quiet, set_quiet

if TYPE_CHECKING:  # the command line calls `speaks` even if torch is not installed
    import torch

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = timedelta(days=7)  # timeout for other processes, which may be working on a layer of a large model
TIDYING = timedelta(seconds=30)
_store: Any = None  # shared by the processes of this run


@dataclass(frozen=True)
class Processes:
    """Rank and device of this process, and the number of processes: in all (count), on this machine (local)."""

    rank: int
    count: int
    device: torch.device
    local: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.count > 1:
            import torch.distributed as dist

            with _connected():
                dist.barrier()

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items that `share` gives to this process."""
        return items[self.rank :: self.count]

    def share(self, items: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
        """work(item) for each item, in order. One process computes each result, and every process gets it."""
        left = iter(items)
        while some := list(islice(left, self.count)):
            result = work(some[self.rank]) if self.rank < len(some) else None
            for owner in range(len(some)):
                yield self.broadcast(owner, result)

    def on_first(self, work: Callable[[], R]) -> R:
        """Return the result of work() in the first process; the others wait for it."""
        return self.broadcast(0, work() if self.first else None)

    def broadcast(self, owner: int, value: R | None) -> R:
        """Send the value of the process `owner` to all others; return it."""
        if self.count == 1:
            return value  # type: ignore[return-value]
        import torch
        import torch.distributed as dist

        tensors: list[torch.Tensor] = []
        head: list[Any] = [None]
        if self.rank == owner:
            places: dict[int, int] = {}

            class Packer(pickle.Pickler):
                """Sends a tensor once even if the value contains it twice."""

                def persistent_id(self, part: Any) -> int | None:
                    if not isinstance(part, torch.Tensor):
                        return None
                    if id(part) not in places:
                        places[id(part)] = len(tensors)
                        tensors.append(part)
                    return places[id(part)]

            packed = io.BytesIO()
            Packer(packed, pickle.HIGHEST_PROTOCOL).dump(value)
            head = [(packed.getvalue(), [(tensor.shape, tensor.dtype, tensor.is_cuda) for tensor in tensors])]
        with _connected():
            dist.broadcast_object_list(head, src=owner)
            content, kinds = head[0]
            if self.rank != owner:
                tensors = [
                    torch.empty(shape, dtype=dtype, device=self.device if cuda else "cpu")
                    for shape, dtype, cuda in kinds
                ]
            for tensor in tensors:
                if tensor.numel():  # as bytes, which every backend supports
                    dist.broadcast(tensor.detach().contiguous().view(-1).view(torch.uint8), src=owner)
        if self.rank == owner:
            return value  # type: ignore[return-value]

        class Unpacker(pickle.Unpickler):
            def persistent_load(self, place: int) -> torch.Tensor:
                return tensors[place]

        received: R = Unpacker(io.BytesIO(content)).load()
        return received


def processes(device: str) -> Processes:
    """Join the process group that torchrun's environment describes, if any.

    `device` is auto, cpu or cuda; each process takes the GPU of its local rank. Raises DiffbitError if there is no such
    GPU. A process leaves the group only when it ends, because forming a second group for a second run in the same
    processes would hang.
    """
    global _store
    import torch
    import torch.distributed as dist

    if device == "cuda" and not torch.cuda.is_available():
        raise DiffbitError("device cuda was requested, but torch sees no CUDA GPU; pass cpu, or install torch for CUDA")
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    rank, local = (int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))) if count > 1 else (0, 0)
    if on_gpu and local >= torch.cuda.device_count():
        raise DiffbitError(
            f"process {local} has no GPU of its own: this machine has {torch.cuda.device_count()}; "
            "start as many processes as there are GPUs"
        )
    chosen = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(chosen)
    if count > 1 and not dist.is_initialized():
        _store, rank, count = next(dist.rendezvous("env://", rank, count))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=_store, rank=rank, world_size=count, timeout=PATIENCE)
        atexit.register(_close)
        set_quiet(is_quiet() or rank > 0)
    return Processes(rank, count, chosen, int(os.environ.get("LOCAL_WORLD_SIZE", count)))


def speaks() -> bool:
    """Whether this process, which has failed, prints its error: it is alone, or the first of the run to fail."""
    if _store is None:  # before the processes have joined, all of them see the same error
        return int(os.environ.get("WORLD_SIZE", 1)) == 1 or os.environ.get("RANK", "0") == "0"
    with suppress(RuntimeError):  # the process that owns the store has ended and has printed its error
        return bool(_store.add("failed", 1) == 1)
    return False


def leave() -> None:
    """Leave a run that has failed, after the first process has cleaned up."""
    if _store is None:
        return
    _close()
    with suppress(RuntimeError):
        if os.environ["RANK"] == "0":
            _store.set("tidy", "yes")
        else:
            _store.wait(["tidy"], TIDYING)


def _close() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """Turn a failed exchange into a DiffbitError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise DiffbitError(
            f"another process of this run has ended, perhaps out of memory, or its machine is gone ({reason}); "
            "the same command with --resume continues"
        ) from None
