"""Statistics of linear layers' inputs over calibration tokens, and the loss that methods minimise with them.

A Gram matrix of few tokens fits these tokens better than others: GPTQ then compensates errors by correlations that do
not exist. `CalibStats.shrunk` is nearer to the diagonal, by the noise that the tokens themselves show (Ledoit and Wolf
2004; Schaefer and Strimmer 2005, for correlations). With A and B the Gram matrices of two halves of the tokens, H their
mean and r_ij = H_ij / sqrt(H_ii H_jj), the off-diagonal numbers are

    c_i c_j H_ij,    c_i^2 = 1 - min(1, sum_{j != i} v_ij / sum_{j != i} r_ij^2)

    v_ij = (A_ij - B_ij)^2 / (4 H_ii H_jj)

v_ij estimates the variance of r_ij; halves of consecutive tokens also see that tokens of a text depend on each other.
c_i is the correlation's share of what channel i has of both: 0 for inputs that are independent, where only the
importance of channels is left, near 1 for those that rise and fall together. The result is positive semidefinite, as H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...formats import QTensor
from ...io.processes import Processes
from .states import ALONE

ROWS = 512  # rows of a weight per step of `proxy_loss`
BLOCK = 256  # rows of a Gram matrix summed at a time, only from the diagonal on, because it is symmetric
Weights = Mapping[str, Tensor]  # of tokens, [n, S], by linear layer
Pass = Callable[[], tuple[Callable[[], object], Tensor, Weights]]


@dataclass(frozen=True, eq=False)
class CalibStats:
    """Statistics of the inputs X [T, K] of a linear layer y = x W^T, times the roots of the tokens' weights, if these
    have any. Layers with the same input share one object.

    gram      fp32 [K, K], X^T X / T: half the Hessian of mean ||x (W - Wq)^T||^2 with respect to each row of W
    absmax    fp32 [K], the largest |x| of each channel
    mean_abs  fp32 [K], the mean |x| of each channel
    tokens    T
    correlated_share  fp32 [K], c in the docstring above; None: `shrunk` changes nothing
    """

    gram: Tensor
    absmax: Tensor
    mean_abs: Tensor
    tokens: int
    correlated_share: Tensor | None = None

    def shrunk(self) -> Tensor:
        """Return a copy of the Gram matrix, shrunk towards its diagonal."""
        if self.correlated_share is None:
            return self.gram.clone()
        gram = self.gram * self.correlated_share
        gram.mul_(self.correlated_share[:, None]).diagonal().copy_(self.gram.diagonal())
        return gram


class Gatherer:
    """Accumulates CalibStats over batches. Every process adds all batches, but only its share of the Gram matrix."""

    def __init__(self, workers: Processes = ALONE) -> None:
        self.workers, self.tokens = workers, 0
        self._absmax = self._sum_abs = torch.zeros(())
        self._sums = [torch.zeros(()), torch.zeros(())]  # x^T x of each half, from the diagonal on
        self._counts = [0, 0]

    def add(self, x: Tensor) -> None:
        """Add inputs x [T, K] of any float dtype."""
        x = x.float()
        if not self.tokens:
            width = x.shape[1]
            self._sums = [x.new_zeros(width, width), x.new_zeros(width, width)]
            self._absmax = x.new_zeros(width)
            self._sum_abs = x.new_zeros(width)
        self.tokens += len(x)
        for half, part in enumerate(x.tensor_split(2)):
            self._counts[half] += len(part)
            for k in self.workers.mine(range(0, x.shape[1], BLOCK)):
                self._sums[half][k : k + BLOCK, k:].addmm_(part[:, k : k + BLOCK].T, part[:, k:])
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        if len(x):
            torch.maximum(self._absmax, magnitude.amax(0), out=self._absmax)

    def stats(self) -> CalibStats:
        count = max(1, self.tokens)
        for half in self._sums if self.workers.count > 1 and self.tokens else ():
            blocks = range(0, len(half), BLOCK)
            columns = self.workers.share(blocks, partial(_columns, half))
            for k, block in zip(blocks, columns, strict=True):
                half[k : k + BLOCK, k:] = block
        first, second = self._sums
        share = correlated_share(first, second, self._counts) if self.tokens else None
        gram = (first + second).triu_().div_(count) if self.tokens else first
        gram += gram.triu(1).T
        return CalibStats(gram, self._absmax, self._sum_abs / count, self.tokens, share)


def _columns(half: Tensor, start: int) -> Tensor:
    return half[start : start + BLOCK, start:]


def correlated_share(first: Tensor, second: Tensor, counts: Sequence[int]) -> Tensor:
    """Return c [K] in the docstring above, of two halves of the tokens; first, second: x^T x of each, [K, K], of which
    only the upper triangle is read. counts: their numbers of tokens."""
    first_count, second_count = (max(1, count) for count in counts)
    noise, power = torch.zeros(2, len(first), device=first.device)
    diagonal = (first.diagonal() + second.diagonal()) / sum(counts)
    unit = torch.where(diagonal > 0, diagonal.rsqrt(), 0)
    for k in range(0, len(first), BLOCK):
        rows = slice(k, k + BLOCK)
        a, b, both = first[rows, k:], second[rows, k:], unit[rows, None] * unit[k:]
        for total, values in ((noise, (a / first_count - b / second_count) / 2), (power, (a + b) / sum(counts))):
            squares = (values * both).triu_(1).square_()
            total[rows] += squares.sum(1)
            total[k:] += squares.sum(0)
    return (1 - noise / power.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(min=0).sqrt_()


class _Enough(Exception):
    """Ends a pass once every requested layer has received its input."""


def gather(linears: dict[str, nn.Module], passes: Sequence[Pass], workers: Processes = ALONE) -> dict[str, CalibStats]:
    """Return {name: CalibStats of the input} of these linear layers.

    passes: one function per batch; it returns a function that runs the layers on the batch, the mask bool [n, S] of the
    tokens that count, and their weights [n, S] for some of the layers, whose inputs are multiplied by the square roots.
    Layers that receive the same tensor (q, k and v; gate and up) and have the same weights share one object.
    workers: the processes that share the passes.
    """
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of this batch; holds tensors, so their ids stay unique
    inputs_by_name: dict[str, Tensor] = {}
    counted = torch.empty(0)
    weights: Weights = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x, weight = inputs[0], weights.get(name)
            key = id(x), id(weight)
            if key not in seen:
                seen[key] = (x, x[counted] if weight is None else x[counted] * weight[counted].sqrt()[:, None])
            inputs_by_name[name] = seen[key][1]
            if len(inputs_by_name) == len(linears):
                raise _Enough

        return keep

    def inputs(begin: Pass) -> dict[str, Tensor]:
        """Return {name: input [T, K]} of a batch."""
        nonlocal counted, weights, inputs_by_name
        inputs_by_name = {}
        run, counted, weights = begin()
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
    for batch in workers.share(passes, inputs):
        by_input: dict[int, Gatherer] = {}
        for name, x in batch.items():
            if id(x) not in by_input:
                by_input[id(x)] = gatherers.setdefault(name, Gatherer(workers))
                by_input[id(x)].add(x)
            gatherers[name] = by_input[id(x)]
    stats = {gatherer: gatherer.stats() for gatherer in dict.fromkeys(gatherers.values())}
    return {name: stats[gatherer] for name, gatherer in gatherers.items()}


def proxy_loss(weight: Tensor, quantized: QTensor, gram: Tensor, workers: Processes = ALONE) -> float:
    """Return the mean ||x (W - Wq)^T||^2 over the calibration tokens, relative to the mean ||x W^T||^2:
    tr(D G D^T) / tr(W G W^T)."""

    def squares(start: int) -> tuple[float, float]:
        rows = slice(start, start + ROWS)
        exact = weight[rows].float()
        difference = exact - quantized.rows(rows).dequantize()
        lost = ((difference @ gram) * difference).sum(dtype=torch.float64).item()
        return lost, ((exact @ gram) * exact).sum(dtype=torch.float64).item()

    lost, total = map(sum, zip(*workers.share(range(0, len(weight), ROWS), squares), strict=True))
    return max(0.0, lost) / total if total > 0 else 0.0
