"""How much each linear layer minds each format: the KL divergence of the model in which one weight has another format.

    KL = mean over tokens of sum_v p(v) (log p(v) - log q(v)),   nats; p the float model, q the other

`sensitivities` measures it around a base: a model of the same shape, float or quantized. For each linear layer and
format one weight of the base is replaced, and only what can differ is computed again: the hidden states before the
decoder layer at hand are kept, and the model runs from there. That is half the layers on average and the head, so F
formats of all seven linear layers of L decoder layers cost about 7 F L / 2 passes of the text, and as many heads again.
Several are measured side by side, a thread each, so that their number changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models import Decoder
from ..formats import Format, QTensor
from ..linear import QuantLinear
from ..piece import Batch, Piece, Tokens
from ..scheme import Scheme
from ..stats import CalibStats

Rounding = Callable[[str, Tensor, Format, CalibStats | None], QTensor]  # (module, weight, format, stats)
CACHE = 1 << 28  # log-probabilities of the float model that are kept; beyond, they are computed again each time
CHUNK = 1 << 23  # logits at a time


class Reference:
    """The float model's predictions of a text, and the divergence of other models from them."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, text: Tokens) -> None:
        self.decoder, self.text = decoder, text
        enter(decoder, text)
        self._states = [_run(decoder.model.layers, batch) for batch in text.batches()]
        keep = text.count * decoder.config.vocab_size <= CACHE
        self._log_p = [list(self._predict(decoder, states)) for states in self._states] if keep else None

    @torch.no_grad()
    def divergence(self, decoder: Decoder, layers: Sequence[nn.Module] | None = None) -> float:
        """KL, nats a token, of the text's hidden states behind these layers and the head of `decoder`.

        Without layers: of `decoder`, whole, from the embedding on.
        """
        if layers is None:
            enter(decoder, self.text)
            layers = list(decoder.model.layers)
        total = 0.0
        for index, batch in enumerate(self.text.batches()):
            exact = self._predict(self.decoder, self._states[index]) if self._log_p is None else self._log_p[index]
            for log_p, log_q in zip(exact, self._predict(decoder, _run(layers, batch)), strict=True):
                total += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
        return total / self.text.count

    def _predict(self, decoder: Decoder, states: Tensor) -> Iterator[Tensor]:
        """states [T, E] -> log-probabilities fp32 [t, V], some tokens at a time."""
        for rows in states.split(max(1, CHUNK // decoder.config.vocab_size)):
            yield F.log_softmax(decoder.head(rows).float(), dim=-1)


@torch.no_grad()
def sensitivities(
    reference: Reference,
    source: Decoder,
    base: Decoder,
    scheme: Scheme,
    formats: Mapping[str, Sequence[Format | None]],
    rounding: Rounding,
    tokens: Tokens | None = None,
) -> Iterator[tuple[str, int, float]]:
    """(module, place, KL of the base with that linear layer in formats[module][place]), decoder layer by layer.

    source    the float weights: the reference's model, or one that computes the same
    base      of source's shape, its layers float or QuantLinear
    scheme    activations and attention of the base; its formats do not matter here
    tokens    what `rounding` calibrates on: its statistics are of what the layer is given in the base, as when the
              base was quantized (piece.py); None: it gets None
    """
    text, weights, threads = reference.text, source.state_dict(), torch.get_num_threads()
    enter(base, text)
    if tokens is not None:
        enter(base, tokens)
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for index, layer in enumerate(base.model.layers):
            prefix = f"model.layers.{index}."
            own = {module: wanted for module, wanted in formats.items() if module.startswith(prefix)}
            tensors = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
            some = {module: format for module, wanted in own.items() for format in wanted if format is not None}
            piece = Piece(base.config, index, scheme, some, tensors, tokens)
            quantized = _quantized(piece, layer)
            stats = piece.stats(quantized, some) if tokens is not None and some else {}
            measure = partial(_measure, reference, base, piece, quantized, rounding, stats)
            jobs = [(module, place, format) for module in own for place, format in enumerate(own[module])]
            found = pool.map(measure, (module for module, *_ in jobs), (format for *_, format in jobs))
            for (module, place, _), value in zip(jobs, found, strict=True):
                yield module, place, value
            for states in (text, tokens):
                if states is not None:
                    _advance(states, layer)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@torch.no_grad()  # a setting of each thread
def _measure(
    reference: Reference,
    base: Decoder,
    piece: Piece,
    quantized: Mapping[str, QTensor],
    rounding: Rounding,
    stats: Mapping[str, CalibStats],
    module: str,
    format: Format | None,
) -> float:
    """The divergence of `base` with one linear layer of this piece in another format, the others `quantized`."""
    changed = {name: weight for name, weight in quantized.items() if name != module}
    if format is not None:
        changed[module] = rounding(module, piece.tensors[f"{module}.weight"], format, stats.get(module))
    return reference.divergence(base, [piece.module(changed), *base.model.layers[piece.index + 1 :]])


def _quantized(piece: Piece, layer: nn.Module) -> dict[str, QTensor]:
    """The quantized weights of a decoder layer by their full names."""
    return {
        piece.prefix + name: linear.weight for name, linear in layer.named_modules() if isinstance(linear, QuantLinear)
    }


def enter(decoder: Decoder, tokens: Tokens) -> None:
    """Set the hidden states of tokens to what a model's first layer is given."""
    tokens.exact = tokens.hidden = F.embedding(tokens.ids, decoder.model.embed_tokens.weight).float()


def _advance(tokens: Tokens, layer: nn.Module) -> None:
    tokens.exact = tokens.hidden = torch.cat([_pass([layer], batch) for batch in tokens.batches()])


def _pass(layers: Iterable[nn.Module], batch: Batch) -> Tensor:
    x = batch.hidden
    for layer in layers:
        x = layer(x, batch.rope, batch.mask)
    return x


def _run(layers: Iterable[nn.Module], batch: Batch) -> Tensor:
    """The states [T, E] behind `layers` of the tokens that count."""
    return _pass(layers, batch)[batch.counted]
