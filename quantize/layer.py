"""A layer that is being quantized: the embedding, a decoder layer, or the final norm with the head.

Calibration tokens have two versions of hidden states. `exact` has those of the float model, `hidden` those of the model
whose earlier layers are already quantized. The latter are the layer's real input, errors included, so methods calibrate
on them (arXiv 2210.17323, section 3.3). Only one layer and these states are in memory at a time, along with the tensors
that a layer passes to later ones (`Carried`), in both versions, until their last reader is done.

Passing tokens through a layer takes most of the time (SmolLM2-135M: three quarters), so repeated passes are avoided:
`exact` has only some windows unless a method needs all of them, and once the projections of a mixer are quantized, its
output on each batch is kept for later passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import Format, QTensor
from ..formats.linear import QuantEmbedding, QuantLinear
from ..formats.rounding import spread
from ..io.errors import DiffbitError
from ..io.processes import Processes
from ..models import Block, LayerSpec, ModelConfig, rope_for
from ..models.checkpoint.names import EMBEDDING, HEAD
from ..models.layers.state import Carried
from ..models.mixer import Symmetries
from ..ops.cache import TOKENS
from .calibration.states import ALONE, Batch, States
from .calibration.stats import CalibStats, gather
from .model import assemble
from .report import OutputError
from .scheme import EMBEDDING_MODULE, Scheme

LOSS_TOKENS = 1024  # tokens on which the float model's loss shows whether it was trained on such text
UNLIKE = 0.8  # limit of its loss / entropy of the text's tokens. Measured: up to 0.61 on text like the training text,
# from 0.90 on other text (examples/pico, trained on code, on prose), 1.2 to 1.3 for untrained models of that shape
MEASURED_TOKENS = 8192  # tokens on which output errors are measured, spread evenly over the calibration text
MEASURED_ROWS = 8192  # rows of a table on which its output error is measured, spread evenly
TABLE_PART = 1 << 24  # numbers of a table that are rounded, or multiplied, at a time
FINAL_NORM = "model.norm.weight"

R = TypeVar("R", Tensor, QTensor)


class Tokens(States):
    """Calibration tokens: ids [n, S], mask bool [n, S] (None: all count).

    exact: the number of evenly spread windows that also pass through the float model (None: all). With 0, no output
    errors are measured. here: the processes that share the batches.
    """

    def __init__(
        self,
        config: ModelConfig,
        ids: Any,
        mask: Any = None,
        device: torch.device | str = "cpu",
        exact: int | None = None,
        here: Processes = ALONE,
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
        super().__init__(config, ids, counted, here)
        self.count = int(counted.sum())
        some = len(ids) if exact is None else min(exact, len(ids))
        windows = torch.arange(some, device=device) * len(ids) // max(1, some)
        self.exact = States(config, ids[windows], counted[windows], here)
        self.loss: float | None = None  # of the float model, nats per token; set at its head

    def spill(self, folder: Path) -> None:
        """Keep hidden states in files of this folder, and recompute mixer outputs instead of keeping them."""
        self.folder = self.exact.folder = folder

    @property
    def measuring(self) -> bool:
        """Whether output errors and proxy losses are measured."""
        return len(self.exact.ids) > 0

    def entropy(self) -> float:
        """Entropy of the token frequencies in nats, corrected by Miller and Madow: the loss of a unigram model."""
        counts = self.ids[self.mask].unique(return_counts=True)[1].double()
        shares = counts / counts.sum()
        return float(-(shares * shares.log()).sum() + (len(counts) - 1) / (2 * counts.sum()))

    def unlike(self) -> str | None:
        """Return a warning if the text is far from what the model was trained on."""
        if self.loss is None or self.count < LOSS_TOKENS or self.loss < UNLIKE * self.entropy():
            return None
        return (
            f"the calibration text is far from what the model was trained on: its loss is {self.loss:.2f} nats per "
            f"token (perplexity {math.exp(self.loss):,.0f}), and token frequencies alone would give "
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

    @torch.no_grad()
    def advance(self, layer: Layer, quantized: Mapping[str, QTensor]) -> dict[str, float]:
        """Pass both versions through a layer; return the output error of each of its quantized linear layers alone."""
        if layer.index < 0:
            embed = partial(F.embedding, weight=layer.tensors[EMBEDDING])
            table = quantized.get(EMBEDDING_MODULE)
            self.embed(embed if table is None else QuantEmbedding(table))
            self.exact.embed(embed)
            return {}
        if not layer.is_layer:
            self.predict(layer)
        if not layer.is_layer and not (quantized and self.measuring):
            return {}
        probe, quantized = layer.probe(), layer.probed(quantized)
        rounded = _dequantized(probe.module(quantized))
        errors = self._advance_exact(probe, rounded, quantized) if self.measuring else {}
        if layer.is_layer:
            layer.remember(rounded, quantized)

            def run(batch: Batch) -> Tensor:
                layer.step(f"{layer.prefix}output", self.here.count)
                return layer.run(rounded, batch)

            self.take_past(layer.index, run)
        return errors

    def _advance_exact(self, layer: Layer, rounded: nn.Module, quantized: Iterable[str]) -> dict[str, float]:
        """Pass `exact` through a layer, and measure errors on its inputs X: ||X W^T - act(X) Wq^T|| / ||X W^T||."""
        true, errors = layer.module(), {name: OutputError() for name in quantized}
        counted = torch.empty(0)

        def measure(name: str) -> Any:
            linear, error = rounded.get_submodule(name.removeprefix(layer.prefix)), errors[name]
            return lambda _, inputs, output: error.add(output[counted], linear(inputs[0][counted]))

        for name in errors:
            true.get_submodule(name.removeprefix(layer.prefix)).register_forward_hook(measure(name))

        def run(batch: Batch) -> Tensor:
            nonlocal counted
            counted = batch.counted
            return layer.run(true, batch)

        if layer.is_layer:
            self.exact.take_past(layer.index, run)
        else:
            for rows in self.here.own(self.exact.slices):
                run(self.exact.batch(rows))
        every = list(self.here.share(range(self.here.count), lambda _: errors))
        totals = {name: OutputError() for name in errors}
        for name, total in totals.items():
            for part in every:
                total.join(part[name])
        return {name: total.value for name, total in totals.items()}


@dataclass
class Layer:
    """The layer that a method quantizes. Names are full ("model.layers.0.self_attn.q_proj"), rows in canonical order.

    index     -1: the embedding; 0 ... num_layers - 1: a decoder layer; num_layers: the final norm and the head
    tensors   {parameter: float tensor}; a transform replaces them
    formats   {linear layer: Format} of the linear layers to quantize
    tokens    calibration tokens, or None
    refitted  {parameter: float tensor} that methods change in the quantized model only; `tensors` keeps the float
              model's
    here      the processes that share the work
    progress  called with the name of the current linear layer and the finished share of this layer, 0 to 1
    proxy_losses  {linear layer: loss on the statistics that it was rounded with}, if there were any
    """

    config: ModelConfig
    index: int
    scheme: Scheme
    formats: dict[str, Format]
    tensors: dict[str, Tensor]
    tokens: Tokens | None = None
    progress: Callable[[str, float], None] = lambda at, share: None
    here: Processes = ALONE
    refitted: dict[str, Tensor] = field(default_factory=dict)
    proxy_losses: dict[str, float] = field(init=False, default_factory=dict)
    # for each batch of `tokens` that this process computes: see `remember`
    heads: list[tuple[Tensor, tuple[Tensor, ...] | None]] = field(init=False, default_factory=list)
    heads_of: list[Any] = field(init=False, default_factory=list)  # the tensors that `heads` were computed from
    prefix: str = field(init=False)
    _steps: int = field(init=False, default=0)
    _taken: int = field(init=False, default=0)
    _share: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.prefix = f"model.layers.{self.index}." if self.is_layer else ""

    @property
    def is_layer(self) -> bool:
        return 0 <= self.index < self.config.num_layers

    @property
    def spec(self) -> LayerSpec:
        """This decoder layer's part of the model's configuration."""
        return self.config.layers[self.index]

    @property
    def symmetries(self) -> Symmetries:
        """Symmetries of this decoder layer at its place in the model."""
        return self.config.symmetries(self.index)

    def stand_in(self, tokens: int) -> Carried:
        """Return random tensors in place of those that this layer reads from another, for a sequence of `tokens`."""
        mixer, generator = self.spec.mixer, torch.Generator().manual_seed(0)
        if mixer.reads is None:
            return {}
        shapes = ([tokens if dim == TOKENS else int(dim) for dim in shape] for shape in mixer.carried)
        device = next(iter(self.tensors.values())).device
        return {mixer.reads: tuple(torch.randn(1, *shape, generator=generator).to(device) for shape in shapes)}

    def expect(self, steps: int) -> None:
        """Announce `steps` more steps of about equal length, for the progress bar."""
        self._steps += steps

    def step(self, at: str, count: int = 1) -> None:
        """Report `count` finished steps; `at`: the name of the current linear layer."""
        self._taken += count
        self._share = max(self._share, self._taken / max(self._taken, self._steps))
        self.progress(at, self._share)

    def weight(self, name: str) -> Tensor:
        """Return the weight to round for a linear layer: W, or W H if its input will be x H (rounding.py)."""
        weight = self.tensors[f"{name}.weight"]
        return spread(weight, self.formats[name].rounding(name, weight.shape[1], self.scheme.activations))

    def module(self, quantized: Mapping[str, QTensor] | None = None) -> nn.Module:
        """Return the layer as an fp32 module: float if None, else (also if {}) under its scheme with these weights."""
        with torch.device("meta"):
            module = Block(self.config, self.index) if self.is_layer else _Head(self.config, len(self.tensors[HEAD]))
        tensors = self.tensors if quantized is None else self.tensors | self.refitted
        state = {
            self.local(name): (quantized or {}).get(name.removesuffix(".weight"), tensor)
            for name, tensor in tensors.items()
        }
        return assemble(module, state, Scheme() if quantized is None else self.scheme, torch.float32)

    def probe(self) -> Layer:
        """Return this layer, with only MEASURED_ROWS rows of a large head; its input is the same."""
        if self.is_layer:
            return self
        return replace(self, tensors=self.tensors | {HEAD: _sample(self.tensors[HEAD])})

    def probed(self, quantized: Mapping[str, QTensor]) -> Mapping[str, QTensor]:
        """Return the rows of quantized weights that `probe` has."""
        return quantized if self.is_layer else {name: _sample(weight) for name, weight in quantized.items()}

    def local(self, name: str) -> str:
        """Return the name of a parameter or linear layer within `module()`."""
        return name.removeprefix(self.prefix).removeprefix("" if self.is_layer else "model.")

    def run(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Pass a batch through `module()` of this layer."""
        if not self.is_layer:
            return module(batch.hidden)
        return module(batch.hidden, batch.rope, batch.mask, None, batch.carried)

    def remember(self, module: nn.Module, quantized: Mapping[str, QTensor]) -> None:
        """Make the mixer of `module(quantized)` compute its heads only once per batch; passes must keep the batches'
        order.

        Does nothing until all projections before o_proj are quantized.
        """
        mixer: Any = getattr(module, "self_attn", None)
        prefix = f"{self.prefix}self_attn."
        ahead = (prefix, f"{self.prefix}input_layernorm.")
        behind = (f"{prefix}o_proj", f"{prefix}attn_sub_norm")
        own = [name for name in self.formats if name.startswith(prefix) and not name.startswith(behind)]
        tokens = self.tokens
        if mixer is None or tokens is None or tokens.folder or not all(name in quantized for name in own):
            return
        weights = self.tensors | self.refitted | {f"{name}.weight": weight for name, weight in quantized.items()}
        of = [weight for name, weight in weights.items() if name.startswith(ahead) and not name.startswith(behind)]
        same = len(of) == len(self.heads_of) and all(a is b for a, b in zip(of, self.heads_of, strict=True))
        find = mixer.heads
        if same and len(self.heads) == len(tokens.here.own(tokens.slices)):
            found = iter(self.heads)

            def again(*inputs: Any) -> Tensor:
                heads, given = next(found)
                if given is not None:
                    inputs[-1][self.index] = given
                return heads

            mixer.heads = again
            return
        self.heads, self.heads_of = [], of

        def heads(*inputs: Any) -> Tensor:
            made = find(*inputs)
            self.heads.append((made, inputs[-1].get(self.index)))
            return made

        mixer.heads = heads

    @torch.no_grad()
    def stages(self) -> list[list[str]]:
        """Group the linear layers in `formats` by their input tensor, in the order of computation.

        In a decoder layer: q, k and v; o; gate and up; down. The groups are found by passing one token.
        """
        module = self.probe().module()
        found: dict[int, tuple[Tensor, list[str]]] = {}  # keeps the tensors, so that no id is reused

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _, inputs: found.setdefault(id(inputs[0]), (inputs[0], []))[1].append(name)

        for name in self.formats:
            module.get_submodule(name.removeprefix(self.prefix)).register_forward_pre_hook(hook(name))
        device = next(iter(self.tensors.values())).device
        rope = rope_for(self.config, torch.zeros(1, 1, dtype=torch.int64, device=device))
        one = torch.ones(1, 1, self.config.hidden_size, device=device)
        module(one, rope, None, None, self.stand_in(1)) if self.is_layer else module(one)
        return [names for _, names in found.values()]

    @torch.no_grad()
    def stats(
        self, quantized: Mapping[str, QTensor] = MappingProxyType({}), names: Iterable[str] | None = None
    ) -> dict[str, CalibStats]:
        """Gather statistics of the inputs of the linear layers `names`, with the layers in `quantized` already low-bit.

        names: by default those in `formats` that are not `quantized`. A pass stops once their inputs are computed.
        """
        tokens = self.tokens
        assert tokens is not None
        module = _dequantized(self.probe().module(quantized))
        self.remember(module, quantized)
        wanted = [name for name in self.formats if name not in quantized] if names is None else names
        linears = {name: module.get_submodule(name.removeprefix(self.prefix)) for name in wanted}
        self.expect(len(tokens.slices))

        def begin(rows: slice) -> tuple[Callable[[], object], Tensor]:
            batch = tokens.batch(rows)
            self.step(next(iter(linears), self.prefix), tokens.here.count)
            return partial(self.run, module, batch), batch.counted

        return gather(linears, [partial(begin, rows) for rows in tokens.slices], tokens.here)


class _Head(nn.Module):
    """The final norm and the head, or some of its rows: x [n, S, E] -> logits [n, S, rows]."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.norm = config.new_norm()
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def _sample(weight: R) -> R:
    """Return MEASURED_ROWS evenly spread rows of a larger table, a tensor or a QTensor."""
    count = weight.shape[0]
    rows = torch.arange(MEASURED_ROWS) * count // MEASURED_ROWS
    if count <= MEASURED_ROWS:
        return weight
    return weight.rows(rows) if isinstance(weight, QTensor) else weight[rows]


def table_rows(columns: int) -> int:
    """Return how many rows of a table are processed at a time."""
    return max(1, TABLE_PART // columns)


def _dequantized(module: nn.Module) -> nn.Module:
    """Replace quantized layers by float ones where results stay bit-identical, to dequantize once, not per batch."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, QuantLinear) and linear.rounding is None:
            with torch.device("meta"):
                plain = nn.Linear(linear.in_features, linear.out_features, bias=False)
            plain.weight = nn.Parameter(linear.weight.dequantize(), requires_grad=False)
            plain.register_parameter("bias", linear.bias)
            module.set_submodule(name, plain)
    return module
