"""Learned rounding and clipping for the lowest bits, a whole layer at a time (AutoRound, arXiv 2309.05516, eq. 2-4).

    scale = half(start * clip),   code = clamp(round(w / scale + offset) + zero),   weight = scale * (code - zero)

The offset of each weight, in units of its scale, and the clip factor of each group (of an asymmetric one: a factor of
its lower and one of its upper end, from which scale and zero point follow) are found by SignSGD with a step that
falls linearly to 0; round passes gradients straight through. What is minimised is the squared error of the layer's
output: attention with its subtraction and head norm, MLP and residual, so that q, k, v and o make good together what
each of them loses, and the two branches of a pair are rounded for the sake of their difference. The aim is the float
layer's output on exact inputs, reached from the inputs that quantized layers before it really give. The norms and
lambdas of the layer, which stay float, are learned along with it (Adam).

Start are GPTQ's codes. The iterate with the least error on a fixed part of the calibration text is kept; the start is
one of them. Of the head the Kullback-Leibler divergence of its predictions is minimised.

Memory: of one layer, 40 bytes a weight (it in float, offset now and at first, rounded weight, their gradients, codes;
what updates need in passing), what a backward pass keeps of BATCH_TOKENS tokens, and the aim, a float for each hidden
state. A layer of 60 million weights: 2.4 GB, 0.2 GB, and as much again as the calibration tokens' states take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from ...errors import DiffbitError
from ...models.layers.softmax import Arithmetic
from ..formats import Format, QTensor
from ..formats.base import divisor
from ..layer import Layer, Tokens
from ..model import quantize_weight
from ..rounding import straight_through
from . import gptq

CALIBRATED = True
EXACT = True  # the aim is the float model's output, of all calibration tokens
SEED = 0
STEPS = 100
BATCH_TOKENS = 512  # in a step
RATE = 1 / STEPS  # of SignSGD at first, in steps of the weights; what a clip factor's end of the range moves, too
BOUND = 0.5  # of offsets: as far as the neighbour on either side
MARGIN = 0.49  # how far from its code's level a weight starts at most, in steps
CLIP = (0.25, 4.0)  # bounds of clip factors
FLOAT_RATE = 1e-3  # of Adam, at first: norms, biases and lambdas
CHECKS = 4  # how often the iterate is looked at
CHECK_WINDOWS = 16  # what it is looked at with


def quantize_layer(layer: Layer) -> dict[str, QTensor]:
    """Round the weights in layer.formats together; layer.refitted gets better norms, biases and lambdas."""
    if layer.tokens is None:
        raise DiffbitError("learned needs calibration tokens; name a text to take them from (--calibrate mix)")
    start: dict[str, QTensor] = {}
    layer.expect(STEPS)
    for stage in layer.stages():
        stats = layer.stats(start, stage[:1])[stage[0]]
        for name in stage:
            weight, format = layer.tensors[f"{name}.weight"], layer.formats[name]
            start[name] = quantize_weight(gptq.quantize, f"{name}.weight", weight, format, stats)
    with torch.enable_grad():
        return learn(layer, layer.tokens, start)


def learn(layer: Layer, tokens: Tokens, start: Mapping[str, QTensor]) -> dict[str, QTensor]:
    """From `start` on, STEPS steps; the best iterate's weights, its norms and lambdas go into layer.refitted."""
    problem = Problem(layer, tokens)
    weights = {name: LearnedWeight(layer.tensors[f"{name}.weight"], quantized) for name, quantized in start.items()}
    floats = {
        name: tensor.detach().float().clone().requires_grad_()
        for name, tensor in layer.tensors.items()
        if name.removesuffix(".weight") not in start and (tensor.dim() == 1 or "lambda" in name)
    }
    adam = torch.optim.Adam(floats.values(), lr=FLOAT_RATE)
    batches = _batches(len(tokens.ids), max(1, BATCH_TOKENS // tokens.ids.shape[1]), SEED + layer.index)
    least = float("inf")
    best = dict(start)  # should no error be a number
    best_floats: dict[str, Tensor] = {}
    for step in range(STEPS + 1):
        if step % max(1, STEPS // CHECKS) == 0 or step == STEPS:
            with torch.no_grad():
                loss = problem.checked({name: weight() for name, weight in weights.items()}, floats)
            if loss < least:
                least = loss
                best = {name: weight.quantized() for name, weight in weights.items()}
                best_floats = {name: tensor.detach().clone() for name, tensor in floats.items()}
        if step == STEPS:
            break
        problem.loss({name: weight() for name, weight in weights.items()}, floats, next(batches)).backward()
        left = 1 - step / STEPS
        for weight in weights.values():
            weight.update(RATE * left)
        adam.param_groups[0]["lr"] = FLOAT_RATE * left
        adam.step()
        adam.zero_grad()
        layer.step(next(iter(start)))
    for name, tensor in best_floats.items():
        layer.refitted[name] = tensor.to(layer.tensors[name].dtype)
    return best


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of `size` windows out of `count`, for ever; every window comes once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


class Problem:
    """The error of a layer's output as a function of its weights {linear layer: [N, K]} and norms and lambdas."""

    def __init__(self, layer: Layer, tokens: Tokens) -> None:
        self.layer, self.tokens, self.module = layer, tokens, layer.module({}).requires_grad_(False)
        for name, module in self.module.named_modules():
            format = layer.formats.get(layer.prefix + name)
            rounding = format and format.rounding(name, module.in_features, layer.scheme.activations)
            if rounding is not None:
                module.register_forward_pre_hook(lambda _, inputs, rounding=rounding: _straight(rounding, inputs[0]))
            if getattr(module, "logits_hook", None) is not None:
                attention: Any = module
                attention.logits_hook = partial(_straight, attention.logits_hook)
            if getattr(module, "arithmetic", None) is not None:
                own: Any = module
                own.arithmetic = _StraightArithmetic(own.arithmetic)
        true = layer.module()
        self.true = None if layer.is_layer else true
        self.target = torch.empty(0)  # of a layer: [n, S, E]; logits of all tokens would be too many
        if layer.is_layer:
            with torch.no_grad():
                self.target = torch.cat([layer.run(true, batch.hidden, batch) for batch in tokens.exact.batches()])

    def loss(self, weights: Mapping[str, Tensor], floats: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """On these windows of calibration text."""
        batch = self.tokens.batch(rows)
        named = {f"{name}.weight": weight for name, weight in weights.items()} | dict(floats)
        state = {self.layer.local(name): value for name, value in named.items()}
        output = self.layer.run(lambda *inputs: functional_call(self.module, state, inputs), batch.hidden, batch)
        if self.true is None:
            return (output - self.target[rows])[batch.counted].square().sum() / max(1, int(batch.counted.sum()))
        with torch.no_grad():
            exact = self.tokens.exact.batch(rows).hidden
            wanted = self.layer.run(self.true, exact, batch)[batch.counted].log_softmax(-1)
        return F.kl_div(output[batch.counted].log_softmax(-1), wanted, reduction="batchmean", log_target=True)

    def checked(self, weights: Mapping[str, Tensor], floats: Mapping[str, Tensor]) -> float:
        """On CHECK_WINDOWS windows, spread evenly."""
        count = len(self.tokens.ids)
        windows = torch.linspace(0, count - 1, min(count, CHECK_WINDOWS)).round().long()
        size = max(1, BATCH_TOKENS // self.tokens.ids.shape[1])
        parts = [(float(self.loss(weights, floats, rows)), len(rows)) for rows in windows.split(size)]
        return sum(loss * rows for loss, rows in parts) / len(windows)


class LearnedWeight:
    """A weight [N, K] whose rounding is being learned.

    offset        fp32 [N, K], in steps
    upper, lower  fp32, shaped as the scales: factors of the range's ends; only asymmetric formats have a lower one
    """

    def __init__(self, weight: Tensor, start: QTensor) -> None:
        self.weight, self.start, self.format = weight.detach().float(), start, start.format
        self.unit, format = start.format.spacing, start.format
        scale, zero, codes = start.scale[..., None], start.zero, format.grouped(start.codes)
        zeros, grouped = None if zero is None else zero[..., None], format.grouped(self.weight)
        away = format.decode_each(codes, torch.ones_like(scale), zeros) - grouped / divisor(scale)
        nearest = format.encode_each(grouped, scale, zeros).to(torch.uint8)
        # the smallest offset that leads to the start's code
        away = (away - away.clamp(-MARGIN * self.unit, MARGIN * self.unit)).masked_fill_(nearest == codes, 0)
        away = away.flatten(1)[:, : weight.shape[1]].contiguous()
        self.first = away  # an offset stays within BOUND, or between BOUND and where it started
        self.offset = away.clone().requires_grad_()
        self.upper = torch.ones_like(start.scale).requires_grad_()
        self.lower = None if zero is None else torch.ones_like(start.scale).requires_grad_()

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Scales, and zero points as whole floats."""
        scale, zero, format = self.start.scale, self.start.zero, self.format
        if self.lower is None or zero is None:
            scale = scale * self.upper
            return _straight(format.stored, scale), None
        top = 2**format.bits - 1
        below, above = scale * zero * self.lower, scale * (top - zero.float()) * self.upper
        scale = _straight(format.stored, (below + above) / top)
        return scale, _straight(torch.round, below / divisor(scale)).clamp(0, top)

    def __call__(self) -> Tensor:
        """The rounded weight, through which gradients reach the three."""
        offset, weight = self.format.grouped(self.offset), self.format.grouped(self.weight)
        rounded: Tensor = _Round.apply(offset, *self.scales(), weight, self.format)
        return rounded.flatten(1)[:, : self.weight.shape[1]]

    @torch.no_grad()
    def quantized(self) -> QTensor:
        scale, zero = self.scales()
        codes = _encode(self.format.grouped(self.weight), self.format.grouped(self.offset), scale, zero, self.format)
        codes = codes.flatten(1)[:, : self.weight.shape[1]].contiguous()
        return QTensor(self.format, self.start.shape, codes, scale, None if zero is None else zero.to(torch.uint8))

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """A step of SignSGD: offsets move by `rate` steps, and so do the ends of a symmetric range."""
        for parameter in (self.offset, self.upper, self.lower):
            if parameter is None or parameter.grad is None:
                continue
            if parameter is self.offset:
                parameter.sub_(parameter.grad.sign_(), alpha=rate * self.unit)
                bound = BOUND * self.unit
                torch.clamp(parameter, self.first.clamp(max=-bound), self.first.clamp(min=bound), out=parameter)
            else:
                parameter.sub_(parameter.grad.sign_(), alpha=rate / 2 ** (self.format.bits - 1)).clamp_(*CLIP)
            parameter.grad = None


class _Round(torch.autograd.Function):
    """scale * level(w / scale + offset), where rounding to a level counts as adding a constant.

    d/d offset = scale inside the range, else 0;   d/d scale = level - [inside] w / scale;   d/d zero = -scale outside

    Weight and offset are [N, G, group], scale and zero as a QTensor's.
    """

    @staticmethod
    def forward(ctx: Any, offset: Tensor, scale: Tensor, zero: Tensor | None, weight: Tensor, format: Format) -> Tensor:
        codes = _encode(weight, offset, scale, zero, format)
        ctx.save_for_backward(offset, scale, zero, weight, codes)
        ctx.format = format
        return format.decode_each(codes, scale[..., None], None if zero is None else zero[..., None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        offset, scale, zero, weight, codes = ctx.saved_tensors
        scales, zeros = scale[..., None], None if zero is None else zero[..., None]
        place = weight / divisor(scales)
        low, high = ctx.format.bounds(zeros)
        moved = place + offset
        inside = (moved >= low) & (moved <= high)
        level = ctx.format.decode_each(codes, torch.ones_like(scales), zeros)
        grad_scale = (grad * level.sub_(place.mul_(inside))).sum(-1).sum_to_size(scale.shape)
        through = grad * scales
        grad_zero = None if zero is None else -through.masked_fill(inside, 0).sum(-1)
        return through.mul_(inside), grad_scale, grad_zero, None, None


def _encode(weight: Tensor, offset: Tensor, scale: Tensor, zero: Tensor | None, format: Format) -> Tensor:
    """Codes uint8 of weights and offsets [N, G, group]."""
    scale, zero = scale[..., None], None if zero is None else zero[..., None]
    return format.encode_each(torch.addcmul(weight, offset, scale), scale, zero).to(torch.uint8)


def _straight(function: Callable[..., Tensor], value: Tensor, *rest: Any) -> Tensor:
    """function(value, *rest), through which gradients pass as if it were value."""
    return straight_through(value, function(value.detach(), *rest))


class _StraightArithmetic(Arithmetic):
    """Low-bit products, through which gradients pass as if they were exact."""

    def __init__(self, low: Arithmetic) -> None:
        self.low = low

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        exact = super().logits(query, key, scale, branch)
        return exact + (self.low.logits(query.detach(), key.detach(), scale, branch) - exact.detach())

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        exact = super().mix(probabilities, value, head_dim)
        return exact + (self.low.mix(probabilities.detach(), value.detach(), head_dim) - exact.detach())
