"""Gradients of what the float model predicts, at the outputs of its linear layers, a few windows of text at a time.

Labels are SAMPLED from the predictions: the text's own would not give the Fisher matrix (arXiv 1905.12558).

Memory: the model, and the activations of one batch, because weights need no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...io.errors import DiffbitError
from ...models import Decoder
from .states import Batch


@contextmanager
def watching(decoder: Decoder, modules: Iterable[str], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Within the context, each `backward` calls see(module, x, g) for each of these linear layers: its inputs
    x [n, S, K], which live until the end of the pass, and the gradients g [n, S, N] at its outputs."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach()
            output.register_hook(lambda gradients: see(name, x, gradients))

        return forward

    handles = [decoder.get_submodule(name).register_forward_hook(watch(name)) for name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def backward(decoder: Decoder, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pass windows through the float model and back.

    Returns its predictions p [T, V] of the tokens that count, and the gradients [n, S, E] at `batch.hidden` of the
    log-likelihood of labels that are drawn from p.
    """
    inputs = batch.hidden.detach().requires_grad_()
    with torch.enable_grad():
        states = forward(decoder.model.layers, replace(batch, hidden=inputs))[batch.counted]
        log_p = F.log_softmax(decoder.head(states).float(), dim=-1)
        p = log_p.detach().exp()
        if not p.isfinite().all():
            raise DiffbitError(
                f"the model predicts NaN in window {batch.first} of the calibration text, wanted probabilities; the "
                "checkpoint is damaged, or its numbers are too large for its precision"
            )
        labels = torch.multinomial(p, 1, generator=generator)
        (gradients,) = torch.autograd.grad(log_p.gather(1, labels).sum(), inputs)
    return p, gradients


def forward(layers: Iterable[nn.Module], batch: Batch) -> Tensor:
    """Pass windows through decoder layers; returns the hidden states [n, S, E] behind them."""
    x = batch.hidden
    for layer in layers:
        x = layer(x, batch.rope, batch.mask, None, batch.carried)
    return x
