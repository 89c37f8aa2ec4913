"""The state of token windows between layers: hidden states, and tensors that a layer passes to later layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...io.processes import Processes
from ...models import ModelConfig, causal_mask, rope_for
from ...models.layers.masks import default_positions
from ...models.layers.rope import Rope
from ...models.layers.state import Carried
from .spill import DiskTensor

BATCH_TOKENS = 2048  # tokens that pass through a layer at a time
ALONE = Processes(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Batch:
    """The inputs of a layer for some windows of tokens."""

    hidden: Tensor  # fp32 [n, S, E]
    counted: Tensor  # bool [n, S], the tokens that count
    rope: Rope
    mask: Tensor | None  # of attention (models/layers/masks.py)
    carried: Carried  # tensors that earlier layers passed on; a layer adds its own
    first: int  # the first of the windows; -1 if they do not follow one another


class States:
    """Token windows that pass through a model layer by layer: ids [n, S], mask bool [n, S] of the tokens that count.

    workers: the processes that share the batches. Each process keeps the hidden states of all windows.
    """

    def __init__(self, config: ModelConfig, ids: Tensor, mask: Tensor, workers: Processes = ALONE) -> None:
        self.config, self.ids, self.mask, self.workers = config, ids, mask, workers
        self.folder: Path | None = None  # folder of the hidden states; None: in memory
        self.hidden: Tensor | DiskTensor = torch.empty(0)  # fp32 [n, S, E], input of the next layer
        self.carried: dict[int, tuple[Tensor | DiskTensor, ...]] = {}  # {layer: fp32 [n, ...]}, read later
        step = max(1, BATCH_TOKENS // ids.shape[1])
        self.slices = [slice(i, i + step) for i in range(0, len(ids), step)]

    def batches(self) -> Iterator[Batch]:
        """Yield all windows in order, in batches."""
        return map(self.batch, self.slices)

    def batch(self, rows: slice | Tensor) -> Batch:
        """Return the batch of some windows; rows: a slice, or indices int64 [n]."""
        length, device = self.ids.shape[1], self.ids.device
        counted = self.mask[rows]
        padding = None if counted.all() else counted
        first = rows.start if isinstance(rows, slice) else -1
        rope = rope_for(self.config, default_positions(1, length, 0, padding, device))
        carried = {giver: tuple(value[rows] for value in values) for giver, values in self.carried.items()}
        return Batch(self.hidden[rows], counted, rope, causal_mask(length, 0, padding, device), carried, first)

    def embed(self, embedding: Callable[[Tensor], Tensor]) -> None:
        """Set the hidden states to embedding(ids [n, S]) -> [n, S, E]."""
        self.fill(lambda rows: embedding(self.ids[rows]))

    def fill(self, compute: Callable[[slice], Tensor]) -> None:
        self.hidden, self.carried = self.space(self.ids.shape[1], self.config.hidden_size), {}
        for rows in self.slices:
            self.hidden[rows] = compute(rows).float()

    def space(self, *shape: int) -> Tensor | DiskTensor:
        """Allocate a tensor [n, *shape] for all windows, in memory or on disk."""
        size, device = (len(self.ids), *shape), self.ids.device
        return torch.empty(size, device=device) if self.folder is None else DiskTensor(self.folder, size, device)

    def take_past(self, index: int, run: Callable[[Batch], Tensor]) -> None:
        """Replace the hidden states with run(batch), the output of layer `index`, and keep the tensors it passes on."""

        def output_of(rows: slice) -> tuple[Tensor, Carried]:
            batch = self.batch(rows)
            hidden = run(batch)
            return hidden, {index: batch.carried[index]} if index in self.config.last_readers else {}

        for rows, output in zip(self.slices, self.workers.share(self.slices, output_of), strict=True):
            self._put(rows, *output)
        for giver in [giver for giver in self.carried if self.config.last_readers[giver] <= index]:
            del self.carried[giver]

    def _put(self, rows: slice, hidden: Tensor, passed_on: Carried) -> None:
        self.hidden[rows] = hidden
        for giver, values in passed_on.items():
            if giver not in self.carried:
                self.carried[giver] = tuple(self.space(*value.shape[1:]) for value in values)
            for target, value in zip(self.carried[giver], values, strict=True):
                target[rows] = value

    def from_first(self) -> None:
        """Copy the first process's hidden states and carried tensors to all processes."""
        if not self.workers.first:
            self.hidden, self.carried = self.space(self.ids.shape[1], self.config.hidden_size), {}
        for rows in self.slices:

            def states(rows: slice = rows) -> tuple[Tensor, Carried]:
                return self.hidden[rows], {giver: tuple(v[rows] for v in vs) for giver, vs in self.carried.items()}

            received = self.workers.on_first(states)
            if not self.workers.first:
                self._put(rows, *received)
