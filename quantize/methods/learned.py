"""Learned rounding and clipping for the lowest bits, a whole layer at a time (AutoRound, arXiv 2309.05516, eq. 2-4).

    scale = half(start * clip),   code = clamp(round(w / scale + offset) + zero),   weight = scale * (code - zero)

SignSGD, with a learning rate that falls linearly to 0, learns an offset for each weight, in units of its scale, and a
clip factor for each group (two in asymmetric formats, for the lower and the upper end of the range, which determine
scale and zero point). Gradients pass straight through the rounding. The loss is the squared error of the layer's
output, after attention with its subtraction and head norm, MLP and residual. So q, k, v and o can compensate each
other's errors, and the two branches of a pair are rounded for their difference. The target is the float layer's output
on exact inputs; the layer's own inputs are those that the earlier quantized layers produce. The layer's norms and
lambdas, which stay float, are learned too (Adam). For the head, the loss is the KL divergence of its predictions.

Learning starts from GPTQ's codes. It keeps the iterate, which may be the start, with the least error on a fixed part of
the calibration text.

Memory for one layer: 26 bytes per weight (float weight, current and initial offset, rounded weight, its gradient and
the gradient's terms, current and best codes), the activations of STEP_TOKENS tokens for the backward pass, and the
target, one float per hidden state. For 60 million weights: 1.6 GB, 0.1 GB, and as much again as the calibration tokens'
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from ...formats import QTensor, divisor, straight_through
from ...io.errors import DiffbitError
from ...models.layers import Arithmetic
from ..calibration import DiskTensor, Tokens, round_all
from ..calibration.passes import Passes
from ..layer import Layer
from . import STEP_TOKENS, Method, find

SEED = 0
STEPS = 100  # by default; the recipe learned:50 has 50
BOUND = 0.5  # of offsets: they can reach the neighbouring code on either side
MARGIN = 0.49  # largest initial distance of a weight from its code's value, in units of the scale
CLIP = (0.25, 4.0)  # bounds of clip factors
FLOAT_RATE = 1e-3  # initial learning rate of Adam, for norms, biases and lambdas
CHECKS = 2  # number of intermediate evaluations of the iterate
CHECK_WINDOWS = 16  # windows of an evaluation


def quantize_layer(layer: Layer, passes: Passes, steps: int = STEPS) -> dict[str, QTensor]:
    """Round the weights in layer.formats together; put improved norms, biases and lambdas into layer.refitted."""
    if passes.tokens is None:
        raise DiffbitError("learned needs calibration tokens; pass a text, such as --calibrate mix")
    passes.expect(steps + len(layer.formats) * passes.batches)
    start = _start(layer, passes)
    with torch.enable_grad():
        return learn(layer, passes, passes.tokens, start, steps)


def _start(layer: Layer, passes: Passes) -> dict[str, QTensor]:
    start: dict[str, QTensor] = {}
    for stage in layer.stages():
        stats = passes.stats(start, stage[:1])[stage[0]]
        start |= round_all(layer, passes, lambda name: find("gptq").rounds, stage, stats)
    return start


def learn(layer: Layer, passes: Passes, tokens: Tokens, start: Mapping[str, QTensor], steps: int) -> dict[str, QTensor]:
    """Train `steps` steps from `start`; return the best iterate's weights, and put its floats into layer.refitted.

    Rates fall linearly to 0. SignSGD begins with 1 / steps, in scales of the weights; so do the clip factors' ends.
    Each step needs the one before it: one process takes them, and others wait.
    """
    problem = Problem(layer, passes, tokens)
    best, floats = tokens.workers.on_first(lambda: _descend(problem, start, steps))
    for name, tensor in floats.items():
        layer.refitted[name] = tensor.to(layer.tensors[name].dtype)
    return best


def _descend(
    problem: Problem, start: Mapping[str, QTensor], steps: int
) -> tuple[dict[str, QTensor], dict[str, Tensor]]:
    """Return the best iterate: weights; norms, biases and lambdas."""
    layer, passes, tokens = problem.layer, problem.passes, problem.tokens
    weights = {name: LearnedWeight(layer.tensors[f"{name}.weight"], quantized) for name, quantized in start.items()}
    floats = {
        name: tensor.detach().float().clone().requires_grad_()
        for name, tensor in layer.tensors.items()
        if name.removesuffix(".weight") not in start and (tensor.dim() == 1 or "lambda" in name)
    }
    adam = torch.optim.Adam(floats.values(), lr=FLOAT_RATE)
    batches = _batches(len(tokens.ids), max(1, STEP_TOKENS // tokens.ids.shape[1]), SEED + layer.index)
    least = float("inf")
    best = dict(start)  # kept if every loss is NaN
    best_floats: dict[str, Tensor] = {}
    rounded = {name: weight.rounded for name, weight in weights.items()}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for step in range(steps + 1):
            if step % max(1, steps // CHECKS) == 0 or step == steps:
                with torch.no_grad():
                    loss = problem.checked(rounded, floats)
                if loss < least:
                    least = loss
                    best = {name: weight.quantized() for name, weight in weights.items()}
                    best_floats = {name: tensor.detach().clone() for name, tensor in floats.items()}
            if step == steps:
                break
            problem.loss(rounded, floats, next(batches)).backward()
            left = 1 - step / steps
            list(pool.map(LearnedWeight.update, weights.values(), repeat(left / steps)))
            adam.param_groups[0]["lr"] = FLOAT_RATE * left
            adam.step()
            adam.zero_grad()
            passes.step(next(iter(start)))
    return best, best_floats


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield indices of `size` windows out of `count` forever; each window comes once before any is repeated."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


class Problem:
    """The error of a layer's output as a function of its weights {linear layer: [N, K]}, norms, biases and lambdas."""

    def __init__(self, layer: Layer, passes: Passes, tokens: Tokens) -> None:
        self.layer, self.passes, self.tokens = layer, passes, tokens
        self.module = layer.module({}).requires_grad_(False)
        module: Any
        for name, module in self.module.named_modules():
            format = layer.formats.get(layer.prefix + name)
            rounding = format and format.rounding(name, module.in_features, layer.plan.scheme.activations)
            if rounding is not None:
                module.register_forward_pre_hook(lambda _, inputs, rounding=rounding: _straight(rounding, inputs[0]))
            if getattr(module, "logits_hook", None) is not None:
                module.logits_hook = partial(_straight, module.logits_hook)
            if getattr(module, "arithmetic", None) is not None:
                module.arithmetic = _StraightArithmetic(module.arithmetic)
        true = layer.module()
        self.true = None if layer.is_layer else true
        self.target: Tensor | DiskTensor = torch.empty(0)  # empty for the head, whose logits would take too much memory
        if layer.is_layer:
            self.target = tokens.exact.space(*tokens.exact.hidden.shape[1:])

            def aim(rows: slice) -> Tensor:
                return passes.run(true, tokens.exact.batch(rows))

            with torch.no_grad():
                outputs = tokens.workers.share(tokens.exact.slices, aim)
                for rows, output in zip(tokens.exact.slices, outputs, strict=True):
                    self.target[rows] = output

    def loss(self, weights: Mapping[str, Tensor], floats: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Return the loss on these windows of calibration text."""
        batch = self.tokens.batch(rows)
        named = {f"{name}.weight": weight for name, weight in weights.items()} | dict(floats)
        state = {self.layer.local(name): value for name, value in named.items()}
        output = self.passes.run(lambda *inputs: functional_call(self.module, state, inputs), batch)
        if self.true is None:
            return (output - self.target[rows])[batch.counted].square().sum() / max(1, int(batch.counted.sum()))
        with torch.no_grad():
            expected = self.passes.run(self.true, self.tokens.exact.batch(rows))[batch.counted].log_softmax(-1)
        return F.kl_div(output[batch.counted].log_softmax(-1), expected, reduction="batchmean", log_target=True)

    def checked(self, weights: Mapping[str, Tensor], floats: Mapping[str, Tensor]) -> float:
        """Return the loss on CHECK_WINDOWS evenly spread windows."""
        count = len(self.tokens.ids)
        windows = torch.linspace(0, count - 1, min(count, CHECK_WINDOWS)).round().long()
        size = max(1, STEP_TOKENS // self.tokens.ids.shape[1])
        parts = [(float(self.loss(weights, floats, rows)), len(rows)) for rows in windows.split(size)]
        return sum(loss * rows for loss, rows in parts) / len(windows)


class LearnedWeight:
    """A weight [N, K] whose rounding is being learned.

    offset        fp32 [N, K], in units of the scale
    upper, lower  fp32, shaped as the scales: factors of the range's ends; only asymmetric formats have `lower`
    rounded       fp32 [N, K], the resulting weight: scale * level(w / scale + offset)

    All passes process some rows at a time, which stay in cache.
    """

    def __init__(self, weight: Tensor, start: QTensor) -> None:
        self.weight, self.start, self.format = weight.detach().float(), start, start.format
        self.unit, format = start.format.spacing, start.format
        scale, zero, codes = start.scale[..., None], start.zero, format.grouped(start.codes)
        zeros, grouped = None if zero is None else zero[..., None], format.grouped(self.weight)
        away = format.decode_each(codes, torch.ones_like(scale), zeros) - grouped / divisor(scale)
        nearest = format.encode_each(grouped, scale, zeros).to(torch.uint8)
        # the smallest offset that gives the initial code
        away = (away - away.clamp(-MARGIN * self.unit, MARGIN * self.unit)).masked_fill_(nearest == codes, 0)
        away = away.flatten(1)[:, : weight.shape[1]].contiguous()
        self.first = away  # an offset stays within +-BOUND, extended to its initial value
        self.offset = away.clone()
        self.upper = torch.ones_like(start.scale).requires_grad_()
        self.lower = None if zero is None else torch.ones_like(start.scale).requires_grad_()
        self.rounded = torch.empty_like(self.weight).requires_grad_()
        self.round()

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return the current scales, and zero points as integer-valued floats."""
        scale, zero, format = self.start.scale, self.start.zero, self.format
        if self.lower is None or zero is None:
            scale = scale * self.upper
            return _straight(format.stored, scale), None
        top = 2**format.bits - 1
        below, above = scale * zero * self.lower, scale * (top - zero.float()) * self.upper
        scale = _straight(format.stored, (below + above) / top)
        return scale, _straight(torch.round, below / divisor(scale)).clamp(0, top)

    @torch.no_grad()
    def round(self) -> None:
        """Compute `rounded` from offset, upper and lower."""
        scale, zero = self.scales()
        for rows, s, z, (weight, offset) in self.format.by_rows(scale, zero, self.weight, self.offset):
            codes = self.format.encode_each(torch.addcmul(weight, offset, s), s, z)
            self.rounded[rows] = self.format.decode_each(codes, s, z).flatten(1)[:, : self.weight.shape[1]]

    @torch.no_grad()
    def quantized(self) -> QTensor:
        scale, zero = self.scales()
        codes = torch.empty(self.weight.shape, dtype=torch.uint8, device=self.weight.device)
        for rows, s, z, (weight, offset) in self.format.by_rows(scale, zero, self.weight, self.offset):
            block = self.format.encode_each(torch.addcmul(weight, offset, s), s, z)
            codes[rows] = block.flatten(1)[:, : codes.shape[1]].to(torch.uint8)
        return QTensor(self.format, self.start.shape, codes, scale, None if zero is None else zero.to(torch.uint8))

    def gradients(
        self, upstream: Tensor, scale: Tensor, zero: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Yield (rows, gradients of their offsets [n, K], scales and zero points [n, G]), some rows at a time.

        d/d offset = scale inside the range, else 0;   d/d scale = level - [inside] w / scale;
        d/d zero = -scale outside; rounding to a level counts as adding a constant. `inside` is float, because torch
        writes and reads booleans seven times more slowly.
        """
        values = (self.weight, self.offset, self.rounded, upstream)
        for rows, s, z, (weight, offset, rounded, grad) in self.format.by_rows(scale, zero, *values):
            below = divisor(s)
            place = weight / below
            moved = place + offset
            inside = moved.clamp(*self.format.bounds(z)).sub_(moved).sign_().abs_().neg_().add_(1)
            to_scale = (rounded / below).addcmul_(place, inside, value=-1).mul_(grad).sum(-1)
            through = grad * s
            to_offset = through * inside
            to_zero = None if z is None else (to_offset - through).sum(-1)
            yield rows, to_offset.flatten(1)[:, : upstream.shape[1]], to_scale, to_zero

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Take a step of SignSGD: move offsets, and the ends of a symmetric range, by `rate` units of the scale."""
        assert self.rounded.grad is not None
        with torch.enable_grad():
            scale_and_zero = [values for values in self.scales() if values is not None]
        scale, zero = scale_and_zero[0].detach(), scale_and_zero[1].detach() if len(scale_and_zero) > 1 else None
        grads = [scale.new_empty(len(self.weight), scale.shape[1]) for _ in scale_and_zero]
        bound = BOUND * self.unit
        for rows, to_offset, *to_ends in self.gradients(self.rounded.grad, scale, zero):
            offset, first = self.offset[rows], self.first[rows]
            offset.sub_(to_offset.sign_(), alpha=rate * self.unit)
            torch.clamp(offset, first.clamp(max=-bound), first.clamp(min=bound), out=offset)
            for total, part in zip(grads, to_ends, strict=False):
                assert part is not None
                total[rows] = part
        ends = [end for end in (self.upper, self.lower) if end is not None]
        grads = [grad.sum_to_size(values.shape) for grad, values in zip(grads, scale_and_zero, strict=True)]
        for end, grad in zip(ends, torch.autograd.grad(scale_and_zero, ends, grads), strict=True):
            end.sub_(grad.sign(), alpha=rate / 2 ** (self.format.bits - 1)).clamp_(*CLIP)
        self.rounded.grad = None
        self.round()


def _straight(function: Callable[..., Tensor], value: Tensor, *rest: Any) -> Tensor:
    """Return function(value, *rest); gradients pass to value unchanged."""
    return straight_through(value, function(value.detach(), *rest))


class _StraightArithmetic(Arithmetic):
    """Low-bit products with the gradients of the exact products."""

    def __init__(self, low: Arithmetic) -> None:
        self.low = low

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int, of_values: bool = False) -> Tensor:
        exact = super().logits(query, key, scale, branch)
        return exact + (self.low.logits(query.detach(), key.detach(), scale, branch, of_values) - exact.detach())

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        exact = super().mix(probabilities, value, head_dim)
        return exact + (self.low.mix(probabilities.detach(), value.detach(), head_dim) - exact.detach())


METHOD = Method("learned", __doc__, round_layer=quantize_layer, calibrated=True, steps=STEPS, alone=True)
