"""Statistics of a linear layer's input over calibration tokens, and the loss that methods minimise with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..processes import Processes
from .formats import QTensor
from .states import ALONE

ROWS = 512  # of a weight whose loss is computed at a time
BLOCK = 256  # rows of a Gram matrix that are summed at a time, right of the diagonal: it is symmetric
Pass = Callable[[], tuple[Callable[[], object], Tensor]]


@dataclass(frozen=True, eq=False)
class CalibStats:
    """Statistics of the inputs X [T, K] of a linear layer y = x W^T; layers with the same input share one object.

    gram      fp32 [K, K], X^T X / T: half the Hessian of mean ||x (W - Wq)^T||^2 in every row of W
    absmax    fp32 [K], the largest |x| of each channel
    mean_abs  fp32 [K], the mean |x| of each channel
    tokens    T
    """

    gram: Tensor
    absmax: Tensor
    mean_abs: Tensor
    tokens: int


class Gatherer:
    """CalibStats summed up over batches, which every process is given; each sums up its share of the Gram matrix."""

    def __init__(self, here: Processes = ALONE) -> None:
        self.here, self.tokens = here, 0
        self._gram = self._absmax = self._sum_abs = torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Add inputs x [T, K], of any float dtype."""
        x = x.float()
        if not self.tokens:
            width = x.shape[1]
            self._gram = x.new_zeros(width, width)
            self._absmax = x.new_zeros(width)
            self._sum_abs = x.new_zeros(width)
        self.tokens += len(x)
        for k in self.here.own(range(0, x.shape[1], BLOCK)):
            self._gram[k : k + BLOCK, k:].addmm_(x[:, k : k + BLOCK].T, x[:, k:])
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        if len(x):
            torch.maximum(self._absmax, magnitude.amax(0), out=self._absmax)

    def stats(self) -> CalibStats:
        count = max(1, self.tokens)
        if self.here.count > 1 and self.tokens:
            blocks = range(0, len(self._gram), BLOCK)
            found = self.here.share(blocks, lambda k: self._gram[k : k + BLOCK, k:])
            for k, block in zip(blocks, found, strict=True):
                self._gram[k : k + BLOCK, k:] = block
        gram = self._gram.triu().div_(count) if self.tokens else self._gram
        gram += gram.triu(1).T
        return CalibStats(gram, self._absmax, self._sum_abs / count, self.tokens)


class _Enough(Exception):
    """Ends a pass early, once every requested layer has had its input."""


def gather(linears: dict[str, nn.Module], passes: Sequence[Pass], here: Processes = ALONE) -> dict[str, CalibStats]:
    """CalibStats of the input of each of these linear layers.

    passes: each begins a batch: a function that takes it through the layers, as far as they lie, and bool [n, S], the
    tokens of it that count. Layers that are handed the same tensor (q, k and v; gate and up) share one gram: it is
    computed and kept once. here: the processes that share the passes.
    """
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # of this batch; tensors are kept, so that an id stays its tensor's
    found: dict[str, Tensor] = {}
    counted = torch.empty(0)

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            if id(x) not in seen:
                seen[id(x)] = (x, x[counted])
            found[name] = seen[id(x)][1]
            if len(found) == len(linears):
                raise _Enough

        return keep

    def inputs(begin: Pass) -> dict[str, Tensor]:
        """{name: [T, K]} of a batch."""
        nonlocal counted, found
        found = {}
        run, counted = begin()
        handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
        try:
            with suppress(_Enough):
                run()
        finally:
            seen.clear()
            for handle in handles:
                handle.remove()
        return found

    gatherers: dict[str, Gatherer] = {}
    for batch in here.share(passes, inputs):
        of: dict[int, Gatherer] = {}
        for name, x in batch.items():
            if id(x) not in of:
                of[id(x)] = gatherers.setdefault(name, Gatherer(here))
                of[id(x)].add(x)
            gatherers[name] = of[id(x)]
    made: dict[int, CalibStats] = {}
    return {name: made.setdefault(id(gatherer), gatherer.stats()) for name, gatherer in gatherers.items()}


def proxy_loss(weight: Tensor, quantized: QTensor, gram: Tensor, here: Processes = ALONE) -> float:
    """mean ||x (W - Wq)^T||^2 / mean ||x W^T||^2 over the calibration tokens: tr(D G D^T) / tr(W G W^T)."""

    def of(start: int) -> tuple[float, float]:
        rows = slice(start, start + ROWS)
        exact = weight[rows].float()
        difference = exact - quantized.rows(rows).dequantize()
        lost = ((difference @ gram) * difference).sum(dtype=torch.float64).item()
        return lost, ((exact @ gram) * exact).sum(dtype=torch.float64).item()

    lost, whole = map(sum, zip(*here.share(range(0, len(weight), ROWS), of), strict=True))
    return max(0.0, lost) / whole if whole > 0 else 0.0
