"""Several processes at one work, as torchrun starts them: which one this is, what it shares with the others, how a run
ends when one of them fails.

torchrun starts the same command many times, on one machine or on several. Each process goes through the same work in
the same order; `share` divides a list of items among them and gives every process all the results, in the order of the
items, so that what is summed over them is what one process would find, to the bit. The first process (rank 0) writes
files, shows progress and speaks.

A process that fails says its sentence, and closes its connections: what the others exchange with it fails, and they end
silently. torchrun kills all when one has ended, so the others wait until the first has tidied up.
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

if TYPE_CHECKING:  # the command line asks who speaks, also where there is no torch
    import torch

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = timedelta(days=7)  # of a process that waits for others: they may be at a layer of a large model
TIDYING = timedelta(seconds=30)
_store: Any = None  # that the processes of this run share


@dataclass(frozen=True)
class Processes:
    """This process, the number of all, and its device; `local`: as many are on this machine."""

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

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Those that `share` gives to this process."""
        return items[self.rank :: self.count]

    def share(self, items: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
        """work(item) of all, in their order; each is done by one process, and every process gets the result."""
        left = iter(items)
        while some := list(islice(left, self.count)):
            made = work(some[self.rank]) if self.rank < len(some) else None
            for owner in range(len(some)):
                yield self.given(owner, made)

    def of_first(self, work: Callable[[], R]) -> R:
        """What the first process makes; the others wait for it."""
        return self.given(0, work() if self.first else None)

    def given(self, owner: int, value: R | None) -> R:
        """The value that this process has, where it is `owner`, goes to all others."""
        if self.count == 1:
            return value  # type: ignore[return-value]
        import torch
        import torch.distributed as dist

        tensors: list[torch.Tensor] = []
        head: list[Any] = [None]
        if self.rank == owner:
            places: dict[int, int] = {}

            class Packer(pickle.Pickler):
                """A tensor twice in the value is sent once."""

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
                if tensor.numel():  # bytes: every backend knows them
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

    `device` is auto, cpu or cuda; each process takes the GPU of its local rank. Raises DiffbitError where there is no
    such GPU. A process leaves the group when it ends: a second group, formed for a second run in the same processes,
    would wait for ever.
    """
    global _store
    import torch
    import torch.distributed as dist

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
        _store, rank, count = next(dist.rendezvous("env://", rank, count))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=_store, rank=rank, world_size=count, timeout=PATIENCE)
        atexit.register(_close)
        set_quiet(is_quiet() or rank > 0)
    return Processes(rank, count, here, int(os.environ.get("LOCAL_WORLD_SIZE", count)))


def speaks() -> bool:
    """Whether this process, which fails, says why: it is the first of the run that does, or alone."""
    if _store is None:  # what is wrong before they have joined, all of them see
        return int(os.environ.get("WORLD_SIZE", 1)) == 1 or os.environ.get("RANK", "0") == "0"
    with suppress(RuntimeError):  # the process that keeps the store has ended: it has spoken
        return bool(_store.add("failed", 1) == 1)
    return False


def leave() -> None:
    """Leave a run that has failed."""
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
    """Turn an exchange that fails into a DiffbitError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise DiffbitError(
            f"another process of this run has ended without a word: out of memory, or its machine is gone ({reason}); "
            "the same command with --resume goes on"
        ) from None
