"""Quantization-aware training: linear layers that compute in a low-bit format and keep their weights in float.

A weight W, its master, is trained in float32; every forward pass multiplies by what a format makes of it, and rounding
is taken as the identity on the way back (the straight-through estimator). One mechanism, formats as values:

    ternary       absmean codes and int8 activations a token (BitNet b1.58, arXiv 2402.17764, eq. 1-3); the forward is
                  the exported operator's: int8 codes, an exact integer sum, times a * s (ops/ternary_matmul.py)
    int2 ... int8 symmetric, steps learned with the weights (LSQ, arXiv 1902.08153, eq. 3 and section 2.2), as factors
                  of those they start from: AdamW moves a number by the learning rate whatever its gradient, and a
                  step of 0.01 would be gone after a few; activations are rounded as the exported operator does it
    codebooks     ranges taken anew from the weights at each step
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DiffbitError
from ..models import Decoder
from ..models.checkpoint.names import shapes
from ..quantize import QTensor, Scheme
from ..quantize.formats import Format
from ..quantize.rounding import Rounding, rounded_input, spread
from ..quantize.scales import search

SMALLEST_STEP = 2.0**-24  # fp16's smallest number


class QATLinear(nn.Linear):
    """y = act(x) Q(W)^T, x [..., K] -> [..., N]; `weight` [N, K] is the master, `step` what is learned of its scales:
    fp32 [N, G], factors of those they start from.

    `refresh` must follow every change of the weight: codes and scale are made there, not at each forward pass.
    """

    def __init__(self, linear: nn.Linear, format: Format, rounding: Rounding | None) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.format = format
        self.rounding = rounding  # of the input
        self.step: nn.Parameter | None = None
        if format.learned:
            start = search(self.weight.detach(), format)[0]
            self.start = start.masked_fill(start == 0, float(start.abs().mean().clamp(min=SMALLEST_STEP)))
            self.step = nn.Parameter(torch.ones_like(start))
        self.codes: Tensor  # uint8 [N, K]
        self.scale: Tensor  # fp32, format.scale_shape
        self.refresh()
        nothing = torch.zeros(1, self.in_features, device=self.weight.device)
        self.zero = int(format.encode(nothing, self.scale[:1], None)[0, 0])  # the code that stands for 0

    @torch.no_grad()
    def refresh(self) -> int:
        """Codes and scales of the weight as it is now; the number of codes that are not what they were."""
        before = getattr(self, "codes", None)
        weight = spread(self.weight.detach(), self.rounding)
        self.scale = self.format.fit(weight)[0] if self.step is None else self._stored(self.step * self.start)
        self.codes = self.format.encode(weight, self.scale, None)
        self._value: Tensor | None = None
        return 0 if before is None else int((before != self.codes).sum())

    def quantized(self) -> QTensor:
        """What the layer multiplies by."""
        return QTensor(self.format, (self.out_features, self.in_features), self.codes, self.scale)

    def value(self) -> Tensor:
        """`quantized` as numbers, fp32 [N, K]; decoded once after a refresh."""
        if self._value is None:
            self._value = self.format.decode(self.codes, self.scale, None)
        return self._value

    def forward(self, x: Tensor) -> Tensor:
        x, weight = spread(x, self.rounding), spread(self.weight, self.rounding)
        if self.format.integer_product:
            return _Ternary.apply(x, weight, self.codes, self.scale, 8 if self.rounding is None else self.rounding.bits)
        if self.step is None:
            weight = _StraightThrough.apply(weight, self.value())
        else:
            weight = _LearnedStep.apply(weight, self.step, self.value(), self.scale, self.start, self.format)
        if self.rounding is not None:
            x = _StraightThrough.apply(x, self.rounding(x.detach()))
        return F.linear(x, weight)

    def _stored(self, scale: Tensor) -> Tensor:
        """Scales as a file holds them; none may reach zero, where nothing would come back."""
        tiny = torch.where(self.start < 0, -SMALLEST_STEP, SMALLEST_STEP)
        return self.format.stored(torch.where(scale.abs() < SMALLEST_STEP, tiny, scale))


class _Ternary(torch.autograd.Function):
    """int8 activations times {-1, 0, 1}: forward exact, backward as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, codes: Tensor, scale: Tensor, bits: int) -> Tensor:
        q, a = rounded_input(x, Rounding(bits))
        q, signs = q.to(torch.int8), codes.to(torch.int8) - 1
        sums = integer_product(q.flatten(0, -2), signs).view(*x.shape[:-1], -1)
        ctx.save_for_backward(q, a, signs, scale)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        ctx.dtype = x.dtype
        return (sums * a * scale.view(1)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, a, signs, scale = ctx.saved_tensors
        grad = grads[0]
        to_x = (grad @ signs.to(grad.dtype)).to(ctx.dtype).mul_(scale.view(1)) if ctx.needs_input_grad[0] else None
        x = (q * a).to(grad.dtype)  # what the weight was multiplied with
        return to_x, (grad.flatten(0, -2).T @ x.flatten(0, -2)).float(), None, None, None


def integer_product(q: Tensor, weight: Tensor) -> Tensor:
    """int8 [M, K] times int8 [N, K] -> exact sums as fp32 [M, N], by whatever is fast: int8 instructions where there
    are, else float32, which holds these sums exactly up to K = 132,000 (|q| <= 127, |w| <= 1)."""
    if q.device.type == "cpu" and torch.cpu._is_vnni_supported():
        return torch._int_mm(q, weight.T.contiguous()).float()
    if q.device.type == "cuda" and len(q) > 16 and not q.shape[1] % 8 and not len(weight) % 8:
        return torch._int_mm(q, weight.T).float()
    with torch.autocast(q.device.type, enabled=False):  # which would round the sums
        return F.linear(q.float(), weight.float())


class _LearnedStep(torch.autograd.Function):
    """LSQ: scale * clip(round(W / scale), -Q - 1, Q), Q = 2^(bits - 1) - 1; what `value` holds already.

    Gradients (arXiv 1902.08153, eq. 3 and 5; here a bound belongs to the outside):

        to W        that of the output inside the range, 0 outside
        to scale    times round(W / scale) - W / scale inside, times the bound outside, summed over the n weights that
                    share it, times 1 / sqrt(n Q) (section 2.2); `step` is scale / start, so times start
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, step: Tensor, value: Tensor, scale: Tensor, start: Tensor, format: Format
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, start)
        ctx.format = format
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, start = ctx.saved_tensors
        format, columns = ctx.format, weight.shape[1]
        high = 2 ** (format.bits - 1) - 1
        ratio = format.grouped(weight) / scale[..., None]  # [N, G, group]
        grad = format.grouped(grads[0])
        inside = (ratio > -high - 1) & (ratio < high)
        slope = torch.where(inside, ratio.round() - ratio, ratio.clamp(-high - 1, high))
        groups, size = ratio.shape[1:]
        count = torch.full((groups,), size, dtype=torch.float32, device=weight.device)
        count[-1] -= groups * size - columns  # the last group may be short
        to_step = (grad * slope).sum(-1) * start / (count * high).sqrt()
        return (grad * inside).flatten(1)[:, :columns], to_step, None, None, None, None


def prepare(model: Decoder, scheme: Scheme) -> list[QATLinear]:
    """Put QATLinears in the place of the layers that a scheme quantizes; their weights stay the same parameters."""
    made = []
    for name, format in scheme.formats(model.config).items():
        if not format.symmetric:
            raise DiffbitError(f"training cannot learn {format}: its zero points do not move; use a symmetric format")
        if name == "lm_head" and model.lm_head is None:
            raise DiffbitError("the head shares the embedding's weight, which is not trained in a format; leave it out")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        rounding = format.device_rounding(format.rounding(name, linear.in_features, scheme.activations))
        layer = QATLinear(linear, format, rounding)
        model.set_submodule(name, layer)
        made.append(layer)
    if not made:
        raise DiffbitError("the scheme quantizes no weights, so there is nothing to train for; name a format")
    return made


def refresh(layers: list[QATLinear]) -> dict[str, float]:
    """Codes of all layers after a step: the shares of codes that moved ("flips") and that stand for 0 ("zeros")."""
    weights = sum(layer.codes.numel() for layer in layers)
    flips = sum(layer.refresh() for layer in layers)
    zeros = sum(int((layer.codes == layer.zero).sum()) for layer in layers)
    return {"flips": flips / weights, "zeros": zeros / weights}


class _StraightThrough(torch.autograd.Function):
    """`rounded` forward, the identity of `exact` backward."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.to(exact.dtype).view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def weights(model: Decoder) -> dict[str, Tensor | QTensor]:
    """The model's weights by name, those of QATLinears as they multiply."""
    found: dict[str, Tensor | QTensor] = {}
    for name in shapes(model.config):
        layer = model.get_submodule(name.rpartition(".")[0])
        found[name] = layer.quantized() if isinstance(layer, QATLinear) else model.get_parameter(name).detach()
    return found
