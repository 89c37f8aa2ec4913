"""What a model computes of one text: attention maps, lambdas, logits and hidden states of each layer.

The maps are those that the model uses. `Attention.logits_hook` sees the scaled logits q k^T / sqrt d of all softmaxes,
and their softmax over the keys that a query may see is the map: of a plain head its only one; of a differential head
the signal (softmax 2i) and the noise (2i+1), whose difference multiplies the values (arXiv 2410.05258, eq. 1):

    difference = softmax(Q1 K1^T / sqrt d) - lambda softmax(Q2 K2^T / sqrt d)

Version 1 has one lambda per layer, version 2 one per head and query. Low-bit logits are rounded before the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models import Decoder
from ...models.attention import Attention, Differential


@dataclass(frozen=True)
class Maps:
    """Attention of one layer, H heads (of a differential layer: pairs), on a text of T tokens; on the CPU."""

    logits: Tensor  # fp32 [softmaxes, T, T] scaled, before rounding and mask; row: query, column: key
    valid: Tensor  # bool [T, T]: the query may see the key
    weights: Tensor  # fp32 [H, branches, T, T]: signal and noise, or one map
    lambdas: Tensor | None  # fp32 [H, T], by query; None in a plain layer

    @property
    def used(self) -> Tensor:
        """What multiplies the values, [H, T, T]: the difference, or the plain map."""
        if self.lambdas is None:
            return self.weights[:, 0]
        return self.weights[:, 0] - self.lambdas[..., None] * self.weights[:, 1]


@dataclass(frozen=True)
class Run:
    """A model's run on one text."""

    next_logits: Tensor  # fp32 [V], of the token that follows
    hidden: list[Tensor]  # fp32 [T, E] of each layer: the residual stream behind it
    maps: dict[int, Maps]  # of each layer that has attention


def run(decoder: Decoder, token_ids: Sequence[int]) -> Run:
    """Run the model on a text, without gradients."""
    parts: list[dict[str, Any]] = [{} for _ in decoder.model.layers]
    ids = torch.tensor([list(token_ids)], device=next(decoder.parameters()).device)
    with torch.inference_mode(), _observed(decoder, parts):
        logits = decoder(ids)[0, -1].float().cpu()
    hidden = [part.pop("hidden") for part in parts]
    return Run(logits, hidden, {layer: _maps(**part) for layer, part in enumerate(parts) if "logits" in part})


def _maps(heads: int, logits: Tensor, valid: Tensor, weights: Tensor, lambdas: Tensor | None) -> Maps:
    if lambdas is not None:  # a scalar, or [1, H, T, 1]
        lambdas = lambdas.float().cpu().expand(1, heads, len(valid), 1)[0, ..., 0]
    return Maps(logits, valid, weights.unflatten(0, (heads, -1)), lambdas)


@contextmanager
def _observed(decoder: Decoder, parts: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Collect each layer's part of a run while the context lasts; the hooks that a model has keep working."""

    def see_logits(part: dict[str, Any], before: Callable[..., Tensor] | None, x: Tensor, valid: Tensor) -> Tensor:
        used = x if before is None else before(x, valid)
        part["logits"], part["valid"] = x[0].float().cpu(), valid[0, 0].cpu()
        part["weights"] = used[0].float().masked_fill(~valid[0], -torch.inf).softmax(-1).cpu()
        return used

    def see_input(part: dict[str, Any], module: Attention, args: tuple[Any, ...]) -> None:
        part["heads"] = module.num_heads
        part["lambdas"] = module.lambda_of(args[0]) if isinstance(module, Differential) else None

    def see_output(part: dict[str, Any], module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        part["hidden"] = output[0].float().cpu()

    with ExitStack() as undo:
        for layer, part in zip(decoder.model.layers, parts, strict=True):
            undo.callback(layer.register_forward_hook(partial(see_output, part)).remove)
            attention = layer.get_submodule("self_attn")
            if isinstance(attention, Attention):
                undo.callback(attention.register_forward_pre_hook(partial(see_input, part)).remove)
                before = attention.logits_hook
                undo.callback(setattr, attention, "logits_hook", before)
                attention.logits_hook = partial(see_logits, part, before)
        yield
