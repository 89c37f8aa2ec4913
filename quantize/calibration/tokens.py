"""Calibration tokens, in two versions of hidden states.

`exact` has those of the float model, `hidden` those of the model whose earlier layers are already quantized. The latter
are a layer's real input, errors included, so methods calibrate on them (arXiv 2210.17323, section 3.3), except those
that only weigh channels: for those both versions come from the float model (`rounded` is False), and `exact` only
measures. Only one layer and these states are in memory at a time, along with the tensors that a layer passes to later
ones (`Carried`), in both versions, until their last reader is done.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...io.errors import DiffbitError
from ...io.processes import Processes
from ...models import ModelConfig
from ...models.checkpoint.names import HEAD
from ..layer import Layer, table_rows
from .states import ALONE, States

LOSS_TOKENS = 1024  # tokens on which the float model's loss shows whether it was trained on such text
UNLIKE = 0.8  # limit of its loss / entropy of the text's tokens. Measured: up to 0.61 on text like the training text,
# from 0.90 on other text (examples/pico, trained on code, on prose), 1.2 to 1.3 for untrained models of that shape
MEASURED_TOKENS = 8192  # tokens on which output errors are measured, spread evenly over the calibration text


class Tokens(States):
    """Calibration tokens: ids [n, S], mask bool [n, S] (None: all count).

    compared_windows: the number of evenly spread windows that also pass through the float model (None: all). With 0, no
    output errors are measured. workers: the processes that share the batches. rounded: `hidden` are those behind the
    quantized layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        ids: Any,
        mask: Any = None,
        device: torch.device | str = "cpu",
        compared_windows: int | None = None,
        workers: Processes = ALONE,
        rounded: bool = True,
    ) -> None:
        ids = torch.as_tensor(ids, dtype=torch.int64, device=device)
        if ids.dim() != 2 or not ids.numel():
            raise DiffbitError(f"calibration tokens have shape {tuple(ids.shape)}, wanted [windows, length]")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise DiffbitError(
                f"calibration tokens run from {ids.min()} to {ids.max()}, but the model has {config.vocab_size}; use "
                "the model's own tokenizer"
            )
        counted = (torch.ones_like(ids) if mask is None else torch.as_tensor(mask, device=device)).bool()
        if counted.shape != ids.shape:
            raise DiffbitError(f"the calibration mask has shape {tuple(counted.shape)}, wanted {tuple(ids.shape)}")
        super().__init__(config, ids, counted, workers)
        self.count, self.rounded = int(counted.sum()), rounded
        compared = len(ids) if compared_windows is None else min(compared_windows, len(ids))
        windows = torch.arange(compared, device=device) * len(ids) // max(1, compared)
        self.exact = States(config, ids[windows], counted[windows], workers)
        self.weights: dict[str, torch.Tensor] = {}  # of the tokens, [n, S], in a linear layer's statistics; none: all 1
        self.loss: float | None = None  # of the float model, nats per token; set at its head

    def spill(self, folder: Path) -> None:
        """Keep hidden states in files of this folder, and recompute mixer outputs instead of keeping them."""
        self.folder = self.exact.folder = folder

    @property
    def measuring(self) -> bool:
        """Whether output errors and proxy losses are measured."""
        return len(self.exact.ids) > 0

    def entropy(self) -> float:
        """Return the entropy of token frequencies in nats, corrected (Miller, Madow): the loss of a unigram model."""
        counts = self.ids[self.mask].unique(return_counts=True)[1].double()
        shares = counts / counts.sum()
        return float(-(shares * shares.log()).sum() + (len(counts) - 1) / (2 * counts.sum()))

    def unlike(self) -> str | None:
        """Return a warning if the text is far from what the model was trained on."""
        if self.loss is None or self.count < LOSS_TOKENS or self.loss < UNLIKE * self.entropy():
            return None
        return (
            f"the calibration text is far from what the model was trained on: its loss is {self.loss:.2f} nats per "
            f"token (perplexity {math.exp(min(self.loss, 700)):,.0f}), and token frequencies alone would give "
            f"{self.entropy():.2f}; with --calibrate, pass text similar to the training text"
        )

    @torch.no_grad()
    def predict(self, layer: Layer) -> None:
        """Measure `loss` at the head on a few windows, some rows of the head at a time."""
        rows = slice(0, None, max(1, self.exact.ids.numel() // LOSS_TOKENS))
        counted, table = self.exact.mask[rows], layer.tensors[HEAD]
        scored = counted[:, 1:] & counted[:, :-1]
        ids = self.exact.ids[rows, 1:][scored]
        if not len(ids):
            return
        hidden = layer.probe().module().get_submodule("norm")(self.exact.hidden[rows][:, :-1][scored])  # [T, E]
        total = hidden.new_full((len(ids),), -math.inf)
        for part in table.split(table_rows(table.shape[1])):
            total = torch.logaddexp(total, F.linear(hidden, part.float()).logsumexp(-1))
        self.loss = float((total - (hidden * table[ids].float()).sum(-1)).mean())
