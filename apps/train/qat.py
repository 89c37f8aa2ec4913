"""Quantization-aware training: linear layers compute in a low-bit format and keep float master weights.

A master weight W is trained in float32. Each forward pass multiplies by its quantized value, and the backward pass
treats rounding as the identity (the straight-through estimator). The formats differ in their scales:

    ternary        absmean codes, int8 activations with one scale per token (BitNet b1.58, arXiv 2402.17764, eq. 1-3);
                   the forward pass equals the exported operator: int8 codes, an exact integer sum, times a * s
                   (ops/ternary_matmul.py)
    int2 ... int8  symmetric; scales are learned together with the weights (LSQ, arXiv 1902.08153, eq. 3 and section
    bin_g128, ...  2.2), as factors of their initial values: AdamW changes a parameter by about the learning rate
                   whatever its gradient, so a scale of 0.01 would vanish after a few training steps; activations are
                   rounded as in the exported operator
    codebooks      scales are fitted to the weights after each training step

What is trained, beside the vectors of a model (norms, biases, lambda), is one of these:

    all        every weight, and the learned scales
    scales     the learned scales; codes stay as they were rounded, by any method if the run starts from a quantized
               checkpoint (E2E-QP of EfficientQAT, arXiv 2407.11062, section 3.3)
    lora       the learned scales, and low-rank adapters: W = W_0 + B A is what is rounded (LR-QAT, arXiv 2406.06385,
               eq. 5), A [r, K], B [N, r], so the trained model has no adapters
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...formats import Format, QTensor, Rounding, rounded_input, spread, straight_through
from ...io.errors import DiffbitError
from ...models import Decoder
from ...models.checkpoint import shapes
from ...quantize import Scheme
from ...quantize.calibration import search

MIN_SCALE = 2.0**-24  # the smallest number above 0 in fp16


class QATLinear(nn.Linear):
    """y = act(x) Q(W)^T + bias, x [..., K] -> [..., N]. `weight` [N, K] is the master weight. With learned scales,
    `factor` fp32 [N, G] is a parameter: scale = factor * initial scale.

    Call `refresh` after every change of the weight: it computes the codes and scales for the forward pass. With
    `gathers`, a backward pass only adds up the gradient of the learned scales' product with the codes; the next one
    without it goes on to weight and factor, with the sum.
    """

    def __init__(
        self,
        linear: nn.Linear,
        format: Format,
        rounding: Rounding | None,
        trainable: str = "all",
        quantized: QTensor | None = None,
        rank: int = 32,
    ) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.bias = linear.weight, linear.bias
        self.format = format
        self.rounding = rounding  # of the input
        self.factor: nn.Parameter | None = None
        if format.learned:
            start = search(self.weight.detach(), format)[0] if quantized is None else quantized.scale
            self.start = start.masked_fill(start == 0, float(start.abs().mean().clamp(min=MIN_SCALE)))
            self.factor = nn.Parameter(torch.ones_like(start))
        self.fixed = trainable == "scales"
        self.down: nn.Parameter | None = None
        if trainable == "lora":
            self.down = nn.Parameter(torch.empty(rank, self.in_features, device=self.weight.device))
            self.up = nn.Parameter(torch.zeros(self.out_features, rank, device=self.weight.device))
            nn.init.kaiming_uniform_(self.down, 5**0.5)
        self.gathers, self.gathered = False, None
        self.codes: Tensor  # uint8 [N, K]
        self.scale: Tensor  # fp32, format.scale_shape
        if quantized is not None:
            self.codes = quantized.codes
        self.refresh()
        zeros = torch.zeros(1, self.in_features, device=self.weight.device)
        self.zero = int(format.encode(zeros, self.scale[:1], None)[0, 0])  # the code of 0

    @torch.no_grad()
    def refresh(self) -> int:
        """Compute codes and scales of the current weight. Returns the number of codes that changed."""
        before = getattr(self, "codes", None)
        weight = spread(self.master().detach(), self.rounding)
        self.scale = self.format.fit(weight)[0] if self.factor is None else self._stored(self.factor * self.start)
        if before is None or not self.fixed:
            self.codes = self.format.encode(weight, self.scale, None)
        self._value: Tensor | None = None
        return 0 if before is None else int((before != self.codes).sum())

    def master(self) -> Tensor:
        """Return the float weight [N, K] that is rounded, adapters included."""
        return self.weight if self.down is None else self.weight + self.up @ self.down

    @torch.no_grad()
    def fold(self) -> None:
        """Add the adapters to the weight, and remove them."""
        self.weight.copy_(self.master())
        self.down = None

    def quantized(self) -> QTensor:
        """Return the quantized weight."""
        return QTensor(self.format, (self.out_features, self.in_features), self.codes, self.scale)

    def value(self) -> Tensor:
        """Return the decoded quantized weight, fp32 [N, K], computed once after each `refresh`."""
        if self._value is None:
            self._value = self.format.decode(self.codes, self.scale, None)
        return self._value

    def forward(self, x: Tensor) -> Tensor:
        product = self._product(x)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _product(self, x: Tensor) -> Tensor:
        x, weight = spread(x, self.rounding), spread(self.master(), self.rounding)
        if self.format.integer_product:
            return _Ternary.apply(x, weight, self.codes, self.scale, 8 if self.rounding is None else self.rounding.bits)
        if self.factor is None:
            weight = straight_through(weight, self.value())
        else:
            weight = _LearnedScale.apply(weight, self.factor, self.value(), self)
        if self.rounding is not None:
            x = straight_through(x, self.rounding(x.detach()))
        return F.linear(x, weight)

    def _stored(self, scale: Tensor) -> Tensor:
        """Scales as they are stored in a file, but never 0: a weight with a scale of 0 gets no gradient."""
        tiny = torch.where(self.start < 0, -MIN_SCALE, MIN_SCALE)
        return self.format.stored(torch.where(scale.abs() < MIN_SCALE, tiny, scale))


class _Ternary(torch.autograd.Function):
    """int8 activations times weights in {-1, 0, 1}: exact forward pass, straight-through backward pass."""

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
        x = (q * a).to(grad.dtype)  # the rounded input that the weight was multiplied by
        return to_x, (grad.flatten(0, -2).T @ x.flatten(0, -2)).float(), None, None, None


def integer_product(q: Tensor, weight: Tensor) -> Tensor:
    """int8 [M, K] times int8 [N, K] -> exact sums as fp32 [M, N]. Uses int8 instructions if the machine has them, else
    float32, which holds these sums exactly up to K = 132,000 (|q| <= 127, |w| <= 1)."""
    if q.device.type == "cpu" and torch.cpu._is_vnni_supported():
        return torch._int_mm(q, weight.T.contiguous()).float()
    if q.device.type == "cuda" and len(q) > 16 and not q.shape[1] % 8 and not len(weight) % 8:
        return torch._int_mm(q, weight.T).float()
    with torch.autocast(q.device.type, enabled=False):  # which would round the sums
        return F.linear(q.float(), weight.float())


class _LearnedScale(torch.autograd.Function):
    """LSQ: scale * clip(round(W / scale), -Q - 1, Q), Q = 2^(bits - 1) - 1; the caller passes the result as `value`.
    With a table of levels, round(x) is the nearest level, and the outermost levels are the bounds.

    Gradients (arXiv 1902.08153, eq. 3 and 5; a weight at a bound counts as outside the range):

        for W       the gradient g of the output inside the range, 0 outside
        for scale   g (round(W / scale) - W / scale) inside the range, g times the bound outside, summed over the n
                    weights that share the scale, times 1 / sqrt(n Q) (section 2.2); with fixed codes, g times the code
        for factor  start times that, because scale = factor * start
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor, value: Tensor, layer: QATLinear) -> Tensor:
        ctx.save_for_backward(value if layer.fixed else weight, layer.scale, layer.start)
        ctx.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer, grad = ctx.layer, grads[0]
        if layer.gathered is not None:
            grad = layer.gathered.add_(grad)
        layer.gathered = grad if layer.gathers else None
        if layer.gathers:
            return None, None, None, None
        weight, scale, start = ctx.saved_tensors
        format, columns = layer.format, weight.shape[1]
        low, high = format.value_range
        to_weight, to_scale = None if layer.fixed else torch.empty_like(grad), torch.empty_like(scale)
        for rows, s, _, (ratio, g) in format.by_rows(scale, None, weight, grad):  # a few rows stay in cache
            ratio = ratio / s  # [n, G, group]
            if to_weight is not None:
                inside = (ratio > low) & (ratio < high)
                to_weight[rows] = (g * inside).flatten(1)[:, :columns]
                ratio = torch.where(inside, format.values_each(ratio, None) - ratio, ratio.clamp_(low, high))
            to_scale[rows] = (g * ratio).sum(-1)
        size = format.group_size or columns
        count = torch.arange(columns, 0, -size, device=weight.device).clamp(max=size)  # the last group may be short
        return to_weight, to_scale * (start / (count * high).sqrt()), None, None


def prepare(
    model: Decoder,
    scheme: Scheme,
    trainable: str = "all",
    quantized: Mapping[str, QTensor] = MappingProxyType({}),
    rank: int = 32,
) -> list[QATLinear]:
    """Replace the layers that the scheme quantizes with QATLinears with the same weights, and return them; freeze the
    parameters that are not `trainable`. quantized: codes and scales to start from, by module, if there are any. rank:
    of adapters. Raises DiffbitError for a scheme that training does not support."""
    if trainable != "all":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim < 2)
    layers = []
    for name, format in scheme.formats(model.config).items():
        if not format.symmetric:
            raise DiffbitError(f"training cannot learn {format}: it has zero points; use a symmetric format")
        if format.by_columns:
            raise DiffbitError(
                f"training rounds each weight on its own, but codes of {format} depend on each other; name another "
                f"format, such as int{format.bits}_g32"
            )
        if trainable == "scales" and not format.learned:
            raise DiffbitError(f"{format} has no learned scales to train; use one that has, such as int4_g128")
        start = quantized.get(name)
        if quantized and (start is None or start.format != format):
            raise DiffbitError(
                f"{name} is {'float' if start is None else start.format} in the quantized checkpoint that training "
                f"starts from, wanted {format}; name the checkpoint's own format"
            )
        if name == "lm_head" and model.lm_head is None:
            raise DiffbitError("the head shares the embedding's weight, which cannot be trained in a format; omit it")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        rounding = format.device_rounding(format.rounding(name, linear.in_features, scheme.activations))
        start = None if start is None else start.to(linear.weight.device)
        layer = QATLinear(linear, format, rounding, trainable, start, rank)
        model.set_submodule(name, layer)
        layers.append(layer)
    if not layers:
        raise DiffbitError("the scheme quantizes no weights, so there is nothing to train; name a format")
    return layers


def refresh(layers: list[QATLinear]) -> dict[str, float]:
    """Update the codes of all layers after a training step. Returns the fraction of codes that changed ("flips") and
    that are 0 ("zeros")."""
    weights = sum(layer.codes.numel() for layer in layers)
    flips = sum(layer.refresh() for layer in layers)
    zeros = sum(int((layer.codes == layer.zero).sum()) for layer in layers)
    return {"flips": flips / weights, "zeros": zeros / weights}


def weights(model: Decoder) -> dict[str, Tensor | QTensor]:
    """Return the model's weights by name; those of QATLinears are quantized."""
    floats = {name: model.get_parameter(name).detach() for name in shapes(model.config)}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QATLinear)}
    return floats | {f"{name}.weight": layer.quantized() for name, layer in layers.items()}
