"""What calibration tokens tell about the input of a linear layer, and the loss that methods minimise with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .qtensor import QTensor


@dataclass(frozen=True, eq=False)
class CalibStats:
    """The tokens X [T, K] that reach a linear layer y = x W^T; layers with the same input share one.

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
    """CalibStats summed up over batches."""

    def __init__(self) -> None:
        self.tokens = 0
        self._gram = self._absmax = self._sum_abs = torch.zeros(())

    def add(self, x: Tensor) -> None:
        """x [T, K], any float dtype."""
        x = x.float()
        if not self.tokens:
            width = x.shape[1]
            self._gram = x.new_zeros(width, width)
            self._absmax = x.new_zeros(width)
            self._sum_abs = x.new_zeros(width)
        self.tokens += len(x)
        self._gram.addmm_(x.T, x)
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        if len(x):
            torch.maximum(self._absmax, magnitude.amax(0), out=self._absmax)

    def stats(self) -> CalibStats:
        count = max(1, self.tokens)
        return CalibStats(self._gram / count, self._absmax, self._sum_abs / count, self.tokens)


def gather(
    linears: dict[str, nn.Module], run: Callable[[], None], counted: Callable[[], Tensor]
) -> dict[str, CalibStats]:
    """CalibStats of each of these linear layers while `run` passes tokens through them, a batch at a time.

    counted: bool [n, S], the tokens of the batch at hand that count. Layers that are handed the same tensor (q, k and
    v; gate and up) share one gram: it is computed and kept once.
    """
    gatherers: dict[str, Gatherer] = {}
    seen: dict[int, tuple[Tensor, Gatherer]] = {}  # of this batch; kept, so that an id stays its tensor's

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            known = seen.get(id(x))
            if known is None:
                gatherer = gatherers.setdefault(name, Gatherer())
                gatherer.add(x[counted()])
                seen[id(x)] = (x, gatherer)
            else:
                gatherers[name] = known[1]

        return add

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    last = next(reversed(linears.values()), None)
    if last is not None:
        handles.append(last.register_forward_hook(lambda *_: seen.clear()))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    made: dict[int, CalibStats] = {}
    return {name: made.setdefault(id(gatherer), gatherer.stats()) for name, gatherer in gatherers.items()}


def proxy_loss(weight: Tensor, quantized: QTensor, gram: Tensor) -> float:
    """mean ||x (W - Wq)^T||^2 / mean ||x W^T||^2 over the calibration tokens: tr(D G D^T) / tr(W G W^T)."""
    weight, gram = weight.double(), gram.double()
    difference = weight - quantized.dequantize().double()
    return float(((difference @ gram) * difference).sum() / ((weight @ gram) * weight).sum())
