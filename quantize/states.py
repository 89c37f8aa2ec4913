"""Windows of tokens that pass through a model: their hidden states, and the tensors that layers pass to later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..models import ModelConfig, causal_mask, rope_for
from ..models.layers.masks import default_positions
from ..models.layers.rope import Rope
from ..models.layers.state import Carried
from ..processes import Processes
from .spill import Rows

BATCH_TOKENS = 2048  # that pass a layer at a time
ALONE = Processes(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Batch:
    """Some windows of calibration tokens as they reach a layer."""

    hidden: Tensor  # fp32 [n, S, E]
    counted: Tensor  # bool [n, S], the tokens that count
    rope: Rope
    mask: Tensor | None  # as attention takes it
    carried: Carried  # tensors passed on by earlier layers; a layer adds its own


class States:
    """Windows of tokens on their way through a model: ids [n, S], mask bool [n, S] of those that count.

    here: the processes that share their batches; each has the hidden states of all.
    """

    def __init__(self, config: ModelConfig, ids: Tensor, mask: Tensor, here: Processes = ALONE) -> None:
        self.config, self.ids, self.mask, self.here = config, ids, mask, here
        self.folder: Path | None = None  # where hidden states lie; None: in memory
        self.hidden: Tensor | Rows = torch.empty(0)  # fp32 [n, S, E], before the layer that comes next
        self.carried: dict[int, tuple[Tensor | Rows, ...]] = {}  # fp32 [n, ...], what that layer or a later one reads
        step = max(1, BATCH_TOKENS // ids.shape[1])
        self.slices = [slice(i, i + step) for i in range(0, len(ids), step)]

    def batches(self) -> Iterator[Batch]:
        """Yield all windows in order, in batches."""
        return map(self.batch, self.slices)

    def batch(self, rows: slice | Tensor) -> Batch:
        """Return a batch of these windows; rows: a slice, or indices int64 [n]."""
        length, device = self.ids.shape[1], self.ids.device
        counted = self.mask[rows]
        padding = None if counted.all() else counted
        rope = rope_for(self.config, default_positions(1, length, 0, padding, device))
        carried = {giver: tuple(value[rows] for value in values) for giver, values in self.carried.items()}
        return Batch(self.hidden[rows], counted, rope, causal_mask(length, 0, padding, device), carried)

    def embed(self, embedding: Callable[[Tensor], Tensor]) -> None:
        """Set the hidden states to embedding(ids [n, S]) -> [n, S, E]."""
        self.fill(lambda rows: embedding(self.ids[rows]))

    def fill(self, made: Callable[[slice], Tensor]) -> None:
        self.hidden, self.carried = self.space(self.ids.shape[1], self.config.hidden_size), {}
        for rows in self.slices:
            self.hidden[rows] = made(rows).float()

    def space(self, *shape: int) -> Tensor | Rows:
        """Allocate a tensor [n, *shape] for all windows, in memory or on disk."""
        whole = (len(self.ids), *shape)
        return torch.empty(whole, device=self.ids.device) if self.folder is None else Rows(self.folder, whole)

    def take_past(self, index: int, run: Callable[[Batch], Tensor]) -> None:
        """Layer `index`: run(batch) -> the hidden states behind it."""

        def past(rows: slice) -> tuple[Tensor, Carried]:
            batch = self.batch(rows)
            hidden = run(batch)
            return hidden, {index: batch.carried[index]} if index in self.config.last_readers else {}

        for rows, made in zip(self.slices, self.here.share(self.slices, past), strict=True):
            self._put(rows, *made)
        for giver in [giver for giver in self.carried if self.config.last_readers[giver] <= index]:
            del self.carried[giver]

    def _put(self, rows: slice, hidden: Tensor, given: Carried) -> None:
        self.hidden[rows] = hidden
        for giver, values in given.items():
            if giver not in self.carried:
                self.carried[giver] = tuple(self.space(*value.shape[1:]) for value in values)
            for whole, value in zip(self.carried[giver], values, strict=True):
                whole[rows] = value

    def from_first(self) -> None:
        """Take the first process's hidden states, and what layers handed on."""
        if not self.here.first:
            self.hidden, self.carried = self.space(self.ids.shape[1], self.config.hidden_size), {}
        for rows in self.slices:

            def held(rows: slice = rows) -> tuple[Tensor, Carried]:
                return self.hidden[rows], {giver: tuple(v[rows] for v in vs) for giver, vs in self.carried.items()}

            made = self.here.of_first(held)
            if not self.here.first:
                self._put(rows, *made)
