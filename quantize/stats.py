"""Statistics of a linear layer's input over calibration tokens, and the loss that methods minimise with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .formats import QTensor

ROWS = 512  # rows of a weight whose loss is computed at a time
BLOCK = 256  # rows of a Gram matrix that are summed at a time, only right of the diagonal, as it is symmetric


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
    """Accumulates CalibStats over batches."""

    def __init__(self) -> None:
        self.tokens = 0
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
        for k in range(0, x.shape[1], BLOCK):
            self._gram[k : k + BLOCK, k:].addmm_(x[:, k : k + BLOCK].T, x[:, k:])
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        if len(x):
            torch.maximum(self._absmax, magnitude.amax(0), out=self._absmax)

    def stats(self) -> CalibStats:
        count = max(1, self.tokens)
        gram = self._gram.triu().div_(count) if self.tokens else self._gram
        gram += gram.triu(1).T
        return CalibStats(gram, self._absmax, self._sum_abs / count, self.tokens)


class _Enough(Exception):
    """Ends a pass early, once every requested layer has had its input."""


def gather(
    linears: dict[str, nn.Module], passes: Iterable[tuple[Callable[[], object], Tensor]]
) -> dict[str, CalibStats]:
    """Gather CalibStats of the inputs of these linear layers.

    passes: for each batch a function that runs it through the model, and bool [n, S], its tokens that count. Layers
    with the same input tensor (q, k and v; gate and up) share one Gram matrix, which is computed once.
    """
    gatherers: dict[str, Gatherer] = {}
    seen: dict[int, tuple[Tensor, Gatherer]] = {}  # of this batch; keeps the tensors, so that no id is reused
    counted, reached = torch.empty(0), 0

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal reached
            x = inputs[0]
            if id(x) not in seen:
                gatherer = gatherers.setdefault(name, Gatherer())
                gatherer.add(x[counted])
                seen[id(x)] = (x, gatherer)
            gatherers[name] = seen[id(x)][1]
            reached += 1
            if reached == len(linears):
                raise _Enough

        return add

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    try:
        for run, counts in passes:
            counted = counts
            seen.clear()
            reached = 0
            with suppress(_Enough):
                run()
    finally:
        for handle in handles:
            handle.remove()
    made: dict[int, CalibStats] = {}
    return {name: made.setdefault(id(gatherer), gatherer.stats()) for name, gatherer in gatherers.items()}


def proxy_loss(weight: Tensor, quantized: QTensor, gram: Tensor) -> float:
    """Return mean ||x (W - Wq)^T||^2 / mean ||x W^T||^2 over calibration tokens: tr(D G D^T) / tr(W G W^T)."""
    lost = whole = 0.0
    for rows in (slice(start, start + ROWS) for start in range(0, len(weight), ROWS)):
        exact = weight[rows].float()
        difference = exact - quantized.rows(rows).dequantize()
        lost += ((difference @ gram) * difference).sum(dtype=torch.float64).item()
        whole += ((exact @ gram) * exact).sum(dtype=torch.float64).item()
    return max(0.0, lost) / whole if whole > 0 else 0.0
