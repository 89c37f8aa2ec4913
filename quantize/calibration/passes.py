"""Passes of the calibration tokens through one layer: statistics of its linear layers' inputs, its output errors, and
the hidden states in front of the next layer.

Passing tokens through a layer takes most of the time (SmolLM2-135M: three quarters), so repeated passes are avoided:
`Tokens.exact` has only some windows unless a method needs all of them, and once the projections of a mixer are
quantized, its heads on each batch are kept for later passes (`_Replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...formats import QTensor, QuantEmbedding, spread
from ...io.processes import Processes
from ...models.checkpoint.names import EMBEDDING
from ...models.layers.state import Carried
from ..deviation import OutputError
from ..layer import Layer, with_float_weights
from ..scheme import EMBEDDING_MODULE
from .states import ALONE, Batch
from .stats import CalibStats, Weights, gather
from .tokens import Tokens


class Passes:
    """What a method sees of a layer's calibration.

    tokens        calibration tokens in front of the layer, or None
    progress      called with the name of the current linear layer and the finished share of this layer, 0 to 1
    workers       the processes that share the work
    proxy_losses  {linear layer: loss on the statistics that it was rounded with}, if there were any
    """

    def __init__(
        self,
        layer: Layer,
        tokens: Tokens | None = None,
        progress: Callable[[str, float], None] = lambda at, share: None,
        workers: Processes = ALONE,
    ) -> None:
        self.layer, self.tokens, self.progress, self.workers = layer, tokens, progress, workers
        self.proxy_losses: dict[str, float] = {}
        self._replay = _Replay(layer.index)
        self._steps = self._taken = 0
        self._share = 0.0

    @property
    def batches(self) -> int:
        """Return the number of batches of a pass; 1 without tokens. A weight takes about as long to round as a pass."""
        return 1 if self.tokens is None else len(self.tokens.slices)

    def expect(self, steps: int) -> None:
        """Announce `steps` more steps of about equal length, for the progress bar."""
        self._steps += steps

    def step(self, at: str, count: int = 1) -> None:
        """Report `count` finished steps; `at`: the name of the current linear layer."""
        self._taken += count
        self._share = max(self._share, self._taken / max(self._taken, self._steps))
        self.progress(at, self._share)

    def run(self, module: Callable[..., Tensor], batch: Batch, replay: _Replay | None = None) -> Tensor:
        """Pass a batch through `layer.module()`. replay: has the mixer's heads, or keeps them."""
        if not self.layer.is_layer:
            return module(batch.hidden)
        inputs = (batch.hidden, batch.rope, batch.mask, None, batch.carried)
        return module(*inputs) if replay is None else module(*inputs, replay=replay.for_batch(batch))

    @torch.no_grad()
    def stats(
        self, quantized: Mapping[str, QTensor] = MappingProxyType({}), names: Iterable[str] | None = None
    ) -> dict[str, CalibStats]:
        """Gather statistics of the inputs of the linear layers `names`, with the layers in `quantized` already low-bit.

        names: by default those of `layer.formats` that are not quantized. A pass stops once their inputs are computed.
        """
        layer, tokens = self.layer, self.tokens
        assert tokens is not None
        module = with_float_weights(layer.probe().module(quantized))
        replay = self._replay_for(quantized)
        chosen = [name for name in layer.formats if name not in quantized] if names is None else names
        linears = {name: module.get_submodule(name.removeprefix(layer.prefix)) for name in chosen}
        self.expect(self.batches)

        def begin(rows: slice) -> tuple[Callable[[], object], Tensor, Weights]:
            batch = tokens.batch(rows)
            self.step(next(iter(linears), layer.prefix), tokens.workers.count)
            shared = {name: tokens.weights[name] for name in linears if name in tokens.weights}
            parts = {id(weight): weight[rows] for weight in shared.values()}  # some layers share their weights
            weights = {name: parts[id(weight)] for name, weight in shared.items()}
            return partial(self.run, module, batch, replay), batch.counted, weights

        return gather(linears, [partial(begin, rows) for rows in tokens.slices], tokens.workers)

    @torch.no_grad()
    def importance(self) -> dict[str, Tensor]:
        """Pass the tokens through the float layer; return the mean square of each channel, fp32 [K], of the input of
        each linear layer in `layer.formats`, transformed as the scheme's activations are (formats/rounding.py)."""
        layer, tokens = self.layer, self.tokens
        assert tokens is not None
        module, batch = layer.probe().module(), tokens.batch(slice(0, 0))
        sums: dict[int, dict[str, Tensor]] = {}  # by the batch's first window: to add them up in one order

        def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            rounding = layer.rounding(name)

            def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                x = spread(inputs[0][batch.counted].float(), rounding)
                sums.setdefault(batch.first, {})[name] = x.square().sum(0)

            return add

        for name in layer.formats:
            module.get_submodule(layer.local(name)).register_forward_pre_hook(keep(name))

        def run(current: Batch) -> Tensor:
            nonlocal batch
            batch = current
            self.step(layer.prefix, tokens.workers.count)
            return self.run(module, batch)

        self.expect(self.batches)
        if layer.is_layer:
            tokens.take_past(layer.index, run)
        elif layer.formats:
            for rows in tokens.workers.mine(tokens.slices):
                run(tokens.batch(rows))
        by_window: dict[int, dict[str, Tensor]] = {}
        for part in tokens.workers.share(range(tokens.workers.count), lambda _: sums):
            by_window |= part
        return {
            name: torch.stack([by_window[first][name] for first in sorted(by_window)]).sum(0) / tokens.count
            for name in layer.formats
        }

    @torch.no_grad()
    def advance(self, quantized: Mapping[str, QTensor]) -> dict[str, float]:
        """Pass both versions of the tokens through the layer; return each quantized linear layer's own output error."""
        layer, tokens = self.layer, self.tokens
        if tokens is None:
            return {}
        if layer.index < 0:
            embed = partial(F.embedding, weight=layer.tensors[EMBEDDING])
            table = quantized.get(EMBEDDING_MODULE)
            tokens.embed(embed if table is None or not tokens.rounded else QuantEmbedding(table))
            tokens.exact.embed(embed)
            return {}
        if not layer.is_layer:
            tokens.predict(layer)
            if not (quantized and tokens.measuring):
                return {}
        rounded = with_float_weights(layer.probe().module(layer.probed(quantized)))
        errors = self._advance_exact(rounded, layer.probed(quantized)) if tokens.measuring else {}
        if layer.is_layer and tokens.rounded:
            replay = self._replay_for(quantized)

            def run(batch: Batch) -> Tensor:
                self.step(f"{layer.prefix}output", tokens.workers.count)
                return self.run(rounded, batch, replay)

            tokens.take_past(layer.index, run)
        return errors

    def _advance_exact(self, rounded: nn.Module, quantized: Iterable[str]) -> dict[str, float]:
        """Pass `exact` through a layer, and measure errors on its inputs X: ||X W^T - act(X) Wq^T|| / ||X W^T||."""
        layer, tokens = self.layer, self.tokens
        assert tokens is not None
        true, errors = layer.probe().module(), {name: OutputError() for name in quantized}
        counted = torch.empty(0)

        def measure(name: str) -> Any:
            linear, error = rounded.get_submodule(name.removeprefix(layer.prefix)), errors[name]
            return lambda _, inputs, output: error.add(output[counted], linear(inputs[0][counted]))

        for name in errors:
            true.get_submodule(name.removeprefix(layer.prefix)).register_forward_hook(measure(name))

        def run(batch: Batch) -> Tensor:
            nonlocal counted
            counted = batch.counted
            return self.run(true, batch)

        if layer.is_layer:
            tokens.exact.take_past(layer.index, run)
        else:
            for rows in tokens.workers.mine(tokens.exact.slices):
                run(tokens.exact.batch(rows))
        totals = {name: OutputError() for name in errors}
        for part in tokens.workers.share(range(tokens.workers.count), lambda _: errors):
            for name, total in totals.items():
                total.join(part[name])
        return {name: total.value for name, total in totals.items()}

    def _replay_for(self, quantized: Mapping[str, QTensor]) -> _Replay | None:
        """Return the heads that earlier passes kept, once all projections before o_proj are quantized; emptied if the
        weights that they depend on have changed. None: a pass computes them anew."""
        layer, mixer = self.layer, f"{self.layer.prefix}self_attn."
        behind = (f"{mixer}o_proj", f"{mixer}attn_sub_norm")
        projections = [name for name in layer.formats if name.startswith(mixer) and not name.startswith(behind)]
        if not layer.is_layer or self.tokens is None or self.tokens.folder:
            return None
        if not all(name in quantized for name in projections):
            return None
        weights = layer.tensors | layer.refitted | {f"{name}.weight": weight for name, weight in quantized.items()}
        ahead = (mixer, f"{layer.prefix}input_layernorm.")
        self._replay.keep_heads_of(
            [weight for name, weight in weights.items() if name.startswith(ahead) and not name.startswith(behind)]
        )
        return self._replay


class _Replay:
    """The heads of a layer's mixer on each batch of its tokens, and what the mixer passes on to later layers."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.weights: list[Tensor | QTensor] = []  # that `heads` were computed from
        self.heads: dict[int, tuple[Tensor, tuple[Tensor, ...] | None]] = {}  # by the batch's first window

    def keep_heads_of(self, weights: list[Tensor | QTensor]) -> None:
        """Forget the heads unless they were computed from these very tensors."""
        if len(weights) != len(self.weights) or any(a is not b for a, b in zip(weights, self.weights, strict=True)):
            self.weights, self.heads = weights, {}

    def for_batch(self, batch: Batch) -> Callable[[Callable[[], Tensor], Carried], Tensor]:
        """Return a `Replay` (models/mixers/_mixer.py) for this batch."""

        def replay(compute: Callable[[], Tensor], carried: Carried) -> Tensor:
            if batch.first not in self.heads:
                heads = compute()
                self.heads[batch.first] = heads, carried.get(self.index)
            heads, passed_on = self.heads[batch.first]
            if passed_on is not None:
                carried[self.index] = passed_on
            return heads

        return replay
