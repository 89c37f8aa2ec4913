"""GPTQ that weighs each token by what an error of the layer at that token costs the model.

GPTQ makes the sum over tokens of a layer's squared output errors small, but tokens do not matter alike. Where attention
only rests on a token (often the first of a text), an error of its key or value reaches every later token, and an error
of its query or of its MLP reaches hardly any, while the input of its MLP is a thousand times as large as others. For
small errors e of a layer's outputs y the divergence from the float model is a quadratic form of the Fisher matrix, of
which the diagonal is kept (arXiv 2505.07004, equation 3, with one group for all outputs):

    KL(float || quantized) ~ 1/2 sum_t w_t |e_t|^2,    w_t = mean_n g_tn^2

g [T, N] are the gradients, at the layer's outputs, of the log-likelihood of labels that are drawn from the float
model's predictions. So the Gram matrix is sum_t w_t x_t x_t^T, and the rest is "gptq". Layers with the same input (q, k
and v; gate and up) share one, with the mean of their weights, each divided by its mean.

They take one pass through the whole float model and back before the first layer: this method needs the float model in
memory, and about half of the time again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...io.errors import DiffbitError
from ...io.progress import track
from ...models import Decoder, ModelConfig
from ..calibration import States, Tokens
from ..calibration.gradients import backward, watching
from ..layer import assemble
from ..reorder import Read
from ..scheme import HEAD_MODULE, Scheme, linear_shapes
from . import find

SEED = 0


def token_weights(config: ModelConfig, read: Read, tokens: Tokens) -> dict[str, Tensor]:
    """Return {linear layer: the weight of each token, fp32 [n, S], 0 for those that do not count}.

    Raises DiffbitError if gradients are not finite.
    """
    decoder = float_model(config, read)
    names = [name for name in linear_shapes(config) if name != HEAD_MODULE]
    text, squares, place = States(config, tokens.ids, tokens.mask), dict[str, Tensor](), dict[str, int]()
    text.embed(decoder.embed)

    def see(name: str, x: Tensor, gradients: Tensor) -> None:
        squares[name], place[name] = gradients.float().square().mean(-1)[0], x.data_ptr()

    def weights_of(window: int) -> tuple[dict[str, Tensor], dict[str, int]]:
        squares.clear()
        rows = slice(window, window + 1)
        backward(decoder, text.batch(rows), torch.Generator(tokens.ids.device).manual_seed(SEED + window))
        return {name: weights * text.mask[window] for name, weights in squares.items()}, dict(place)

    with watching(decoder, names, see):
        windows = range(len(text.ids))
        by_window = list(track(tokens.workers.share(windows, weights_of), "weighing tokens", total=len(windows)))
    groups: dict[int, list[str]] = {}  # of layers, by the place of their input
    for name, at in by_window[0][1].items():
        groups.setdefault(at, []).append(name)
    weights: dict[str, Tensor] = {}
    for group in groups.values():
        rows = [torch.stack([window[name] for window, _ in by_window]) for name in group]
        costs = torch.stack(rows)  # [layers, n, S]
        if not costs.isfinite().all():
            raise DiffbitError(
                f"the gradients at the outputs of {group[0]} are not finite; the checkpoint is damaged, or its numbers "
                "are too large: use --method gptq"
            )
        means = costs.sum((1, 2)) / tokens.count
        costs /= means.clamp(min=torch.finfo(torch.float32).tiny)[:, None, None]
        weights |= dict.fromkeys(group, costs.mean(0))
    return weights


def float_model(config: ModelConfig, read: Read) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    tensors = {name: read(name) for name, _ in decoder.named_parameters()}
    return assemble(decoder, tensors, Scheme(), torch.float32).eval().requires_grad_(False)


METHOD = replace(find("gptq"), name="guided", about=__doc__, token_weights=token_weights)
