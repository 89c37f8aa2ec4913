"""Statistics of linear layers' inputs over calibration tokens, and the loss that methods minimise with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...formats import QTensor
from ...io.processes import Processes
from .states import ALONE

ROWS = 512  # rows of a weight per step of `proxy_loss`
BLOCK = 256  # rows of a Gram matrix summed at a time, only from the diagonal on, because it is symmetric
Pass = Callable[[], tuple[Callable[[], object], Tensor]]


@dataclass(frozen=True, eq=False)
class CalibStats:
    """Statistics of the inputs X [T, K] of a linear layer y = x W^T. Layers with the same input share one object.

    gram      fp32 [K, K], X^T X / T: half the Hessian of mean ||x (W - Wq)^T||^2 with respect to each row of W
    absmax    fp32 [K], the largest |x| of each channel
    mean_abs  fp32 [K], the mean |x| of each channel
    tokens    T
    """

    gram: Tensor
    absmax: Tensor
    mean_abs: Tensor
    tokens: int


class Gatherer:
    """Accumulates CalibStats over batches. Every process adds all batches, but only its share of the Gram matrix."""

    def __init__(self, here: Processes = ALONE) -> None:
        self.here, self.tokens = here, 0
        self._gram = self._absmax = self._sum_abs = torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Add inputs x [T, K] of any float dtype."""
        x = x.float()
        if not self.tokens:
            width = x.shape[1]
            self._gram = x.new_zeros(width, width)
            self._absmax = x.new_zeros(width)
            self._sum_abs = x.new_zeros(width)
        self.tokens += len(x)
        for k in self.here.mine(range(0, x.shape[1], BLOCK)):
            self._gram[k : k + BLOCK, k:].addmm_(x[:, k : k + BLOCK].T, x[:, k:])
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        if len(x):
            torch.maximum(self._absmax, magnitude.amax(0), out=self._absmax)

    def stats(self) -> CalibStats:
        count = max(1, self.tokens)
        if self.here.count > 1 and self.tokens:
            blocks = range(0, len(self._gram), BLOCK)
            columns = self.here.share(blocks, lambda k: self._gram[k : k + BLOCK, k:])
            for k, block in zip(blocks, columns, strict=True):
                self._gram[k : k + BLOCK, k:] = block
        gram = self._gram.triu().div_(count) if self.tokens else self._gram
        gram += gram.triu(1).T
        return CalibStats(gram, self._absmax, self._sum_abs / count, self.tokens)


class _Enough(Exception):
    """Ends a pass once every requested layer has received its input."""


def gather(linears: dict[str, nn.Module], passes: Sequence[Pass], here: Processes = ALONE) -> dict[str, CalibStats]:
    """{name: CalibStats of the input} of each of these linear layers.

    passes: one function per batch; it returns a function that runs the layers on the batch, and the mask bool [n, S]
    of the tokens that count. Layers that receive the same tensor (q, k and v; gate and up) share one object. here: the
    processes that share the passes.
    """
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # of this batch; holds the tensors, so their ids stay unique
    inputs_by_name: dict[str, Tensor] = {}
    counted = torch.empty(0)

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            if id(x) not in seen:
                seen[id(x)] = (x, x[counted])
            inputs_by_name[name] = seen[id(x)][1]
            if len(inputs_by_name) == len(linears):
                raise _Enough

        return keep

    def inputs(begin: Pass) -> dict[str, Tensor]:
        """{name: input [T, K]} of a batch."""
        nonlocal counted, inputs_by_name
        inputs_by_name = {}
        run, counted = begin()
        handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
        try:
            with suppress(_Enough):
                run()
        finally:
            seen.clear()
            for handle in handles:
                handle.remove()
        return inputs_by_name

    gatherers: dict[str, Gatherer] = {}
    for batch in here.share(passes, inputs):
        of: dict[int, Gatherer] = {}
        for name, x in batch.items():
            if id(x) not in of:
                of[id(x)] = gatherers.setdefault(name, Gatherer(here))
                of[id(x)].add(x)
            gatherers[name] = of[id(x)]
    stats = {gatherer: gatherer.stats() for gatherer in dict.fromkeys(gatherers.values())}
    return {name: stats[gatherer] for name, gatherer in gatherers.items()}


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
