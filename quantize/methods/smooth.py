"""SmoothQuant: outliers of the activations are moved into the weights (arXiv 2211.10438, eq. 4).

Activations are rounded with one scale a token, its largest number / 127, so that a channel that stands out takes the
bits of all others. Channel j of the input is divided by s_j and the weight's column multiplied, folded as in awq.py:

    s_j = max|x_j|^alpha / max_i|W_ij|^(1 - alpha)        x over the calibration tokens, W all weights that read them

alpha = 0.5 shares the difficulty equally; here it is searched on a grid, and s = 1 with it, for the least error of the
outputs with everything rounded as it will be, on a sample of the tokens X:

    sum over the weights W of  ||X W^T - act(X / s) round(W s)^T||^2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import DiffbitError
from ..folding import per_channel, scale_groups
from ..formats import Format
from ..model import quant_linear
from ..piece import Piece
from ..scheme import Scheme
from .rtn import quantize as rtn

CALIBRATED = True
GRID = tuple(i / 20 for i in range(4, 20))  # alpha
SAMPLE = 512  # tokens that the search looks at
SMALLEST = 1e-5  # largest input and weight of a channel, relative to those of all channels, are no less


@dataclass(frozen=True, eq=False)
class Inputs:
    """What reaches a linear layer: a sample of it fp32 [T, K], and the largest magnitudes of all of it, fp32 [K]."""

    sample: Tensor
    absmax: Tensor


def transform(piece: Piece) -> None:
    if not piece.formats:
        return
    scheme = piece.scheme
    if scheme.activations != "int8" and all(format.kind != "ternary" for format in piece.formats.values()):
        raise DiffbitError(
            "smooth moves outliers out of int8 activations, and under this scheme activations stay float; add "
            "--activations int8, or leave smooth out"
        )
    inputs = gather(piece)
    scale_groups(
        piece,
        lambda first, weights, formats, channels: search(first, weights, formats, inputs[first], scheme, channels),
    )


def search(
    module: str, weights: Sequence[Tensor], formats: Sequence[Format], inputs: Inputs, scheme: Scheme, channels: Tensor
) -> Tensor:
    """Scales fp32 [C] for weights [N, K] that read one input, module the first's; channels: as in folding.Group."""
    channels = channels.to(weights[0].device)
    x = _bounded(per_channel(inputs.absmax, channels, "amax"))
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    w = _bounded(per_channel(largest, channels, "amax"))
    best, least = torch.ones_like(x), torch.inf
    for scale in (torch.ones_like(x), *(x**alpha / w ** (1 - alpha) for alpha in GRID)):
        loss = 0.0
        for weight, format in zip(weights, formats, strict=True):
            layer = quant_linear(module, rtn(weight.float() * scale[channels], format), scheme)
            exact = inputs.sample @ weight.float().T
            loss += float((layer(inputs.sample / scale[channels]) - exact).square().sum(dtype=torch.float64))
        if loss < least:
            best, least = scale, loss
    return best


@torch.no_grad()
def gather(piece: Piece) -> dict[str, Inputs]:
    """The inputs of the linear layers that are to be rounded."""
    tokens, module = piece.tokens, piece.module()
    assert tokens is not None
    samples: dict[str, list[Tensor]] = {name: [] for name in piece.formats}
    absmax = {name: torch.zeros(()) for name in piece.formats}
    stride = -(-tokens.count // SAMPLE)
    batch = None
    piece.expect(len(tokens.slices))

    def hook(name: str) -> None:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert batch is not None
            x = inputs[0][batch.counted].float()  # [T, K]
            samples[name].append(x[::stride].clone())
            if len(x):
                absmax[name] = torch.maximum(absmax[name].to(x.device), x.abs().amax(0))

        module.get_submodule(name.removeprefix(piece.prefix)).register_forward_pre_hook(keep)

    for name in piece.formats:
        hook(name)
    for batch in tokens.batches():
        piece.run(module, batch.hidden, batch)
        piece.step(f"{piece.prefix}output")
    return {name: Inputs(torch.cat(samples[name]), absmax[name]) for name in piece.formats}


def _bounded(values: Tensor) -> Tensor:
    return values.clamp(min=float(values.max()) * SMALLEST).clamp(min=1e-30)
