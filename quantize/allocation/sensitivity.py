"""What rounding a weight costs, from one forward and one backward pass over a few windows of text.

For a small error D = Wq - W of a linear layer y = x W^T, the divergence is a quadratic form of the Fisher matrix (arXiv
1412.1193, section 5), of which only the diagonal is kept, and of that the outer product with the same sums of rows and
columns:

    KL(float || quantized) ~ 1/2 sum_nk D_nk^2 r_n c_k / sum(r)           nats per token

    r_n = sum_k F_nk         c_k = sum_n F_nk         F = E[G^2] / T, the mean over windows of T tokens

G [N, K] is the gradient with respect to W of the log-likelihood of all labels of a window, which are SAMPLED from the
model's predictions: the text's own would not give the Fisher matrix (arXiv 1905.12558). K-FAC (arXiv 1503.05671) would
need only E[g_n^2] E[x_k^2], of outputs' gradients g and inputs x of a token. That is off by up to 5 times for v_proj,
because its errors add up over the tokens that attention averages, and because tokens that attention only rests on have
inputs a thousand times as large as others and hardly any gradient (research/LOG.md).

    head        labels of different tokens are independent, and E over a token's label is known: with probabilities p,
                F_nk = E[x_k^2 p_n (1 - p_n)] over tokens
    embedding   the gradient at its output counts for the row of the token's id. A tied table loses the sum of both

The error of a format is that of ROWS rows of the weight, drawn in proportion to r_n, with scales of least error if the
method searches for them. A method that lets errors compensate each other (GPTQ) leaves a share of the error that
depends on the layer (0.2 for v_proj, 0.5 for gate_proj) and hardly on the format, so it is measured on one format.

Memory: the activations of one window, because weights need no gradients; two vectors for each weight.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...formats import Format
from ...io.progress import track
from ...models import Decoder
from ..calibration import Passes, Tokens, search
from ..calibration.gradients import backward, forward, watching
from ..methods import Layer, Method, quantize_weight
from ..plan import resolve
from ..scheme import EMBEDDING_MODULE, HEAD_MODULE
from .losses import Formats, Losses

ROWS = 64


@dataclass(eq=False)
class Fisher:
    """The diagonal of the Fisher matrix of a weight [N, K], nats per token: its sums rows [N] and columns [K]."""

    rows: Tensor
    columns: Tensor

    def add(self, rows: Tensor, columns: Tensor) -> None:
        self.rows += rows
        self.columns += columns

    def sample(self, weight: Tensor) -> Tensor:
        """Return ROWS rows of a weight [N, K], fp32, drawn in proportion to `rows`."""
        shares = self.rows.double().cumsum(0)
        places = (torch.arange(ROWS, device=shares.device) + 0.5) / ROWS * shares[-1]
        return weight[torch.searchsorted(shares, places).clamp(max=len(weight) - 1)].float()

    def loss(self, weight: Tensor, format: Format, searched: bool) -> float:
        """Return what a weight [N, K] loses in a format, nats per token. searched: with the scales of least error."""
        part = self.sample(weight)
        fitted = search(part, format, self.columns) if searched else format.fit(part)
        errors = format.nearest(part, *fitted).dequantize().sub_(part).square_()
        return float((errors @ self.columns).mean()) / 2


def estimate(decoder: Decoder, text: Tokens, formats: Formats, rounding: Method, seed: int = 0) -> Losses:
    """Return what each linear layer and table loses in its `formats`, rounded by `rounding`, nats per token.

    text: calibration tokens. formats: the first that is not float is the one that `rounding` is tried on.
    """
    matrices, weights = fisher(decoder, text, formats, seed), decoder.state_dict()
    tied = decoder.config.tie_embeddings
    shares = remaining(decoder, text, matrices, formats, rounding) if rounding.calibrated else {}
    losses: Losses = {}
    for module, row in track(formats.items(), "measuring errors", total=len(formats)):
        uses = [module, HEAD_MODULE] if module == EMBEDDING_MODULE and tied else [module]
        losses[module] = {
            name: 0.0
            if format is None
            else sum(
                matrices[use].loss(weights[f"{module}.weight"], format, rounding.stats) * shares.get(use, 1.0)
                for use in uses
            )
            for name, format in row.items()
        }
    return losses


@torch.no_grad()
def remaining(
    decoder: Decoder, text: Tokens, matrices: dict[str, Fisher], formats: Formats, rounding: Method
) -> dict[str, float]:
    """Return the share of each linear layer's error that a calibrated method leaves, compared with a search of scales.

    Errors are those of the layer's output by the shrunk Gram matrix (`CalibStats.shrunk`), which knows how much better
    the method fits the tokens that it calibrates on than others.
    """
    plan, weights, shares = resolve(decoder.config), decoder.state_dict(), dict[str, float]()
    weights.setdefault(f"{HEAD_MODULE}.weight", weights[f"{EMBEDDING_MODULE}.weight"])
    tried = {module: format for module, row in formats.items() for format in reversed(list(row.values())) if format}
    if plan.config.tie_embeddings and EMBEDDING_MODULE in tried:
        tried[HEAD_MODULE] = tried[EMBEDDING_MODULE]
    blocks = list(decoder.model.layers)
    text.embed(decoder.embed)
    for index in track(range(len(blocks) + 1), "trying the method"):
        place = f"model.layers.{index}." if index < len(blocks) else ("model.norm.", HEAD_MODULE)
        tensors = {name: tensor for name, tensor in weights.items() if name.startswith(place)}
        chosen = {module: format for module, format in tried.items() if f"{module}.weight" in tensors}
        stats = Passes(Layer(plan, index, chosen, tensors), text).stats() if chosen else {}
        for module, format in chosen.items():
            part, gram = matrices[module].sample(tensors[f"{module}.weight"]), stats[module].shrunk()
            plain = format.nearest(part, *search(part, format, gram.diagonal())).dequantize() - part
            lost = quantize_weight(rounding.rounds, module, part, format, stats[module]).dequantize() - part
            error = float((plain.square() @ gram.diagonal()).sum())
            shares[module] = float(((lost @ gram) * lost).sum()) / error if error else 1.0
        if index < len(blocks):
            text.take_past(index, partial(forward, [blocks[index]]))
    return shares


def fisher(decoder: Decoder, text: Tokens, modules: Collection[str], seed: int = 0) -> dict[str, Fisher]:
    """Return the Fisher matrices of the linear layers `modules`, of the embedding and of the head, by name."""
    layers = [name for name in modules if name not in (EMBEDDING_MODULE, HEAD_MODULE)]
    generator = torch.Generator(text.ids.device).manual_seed(seed)
    weights = decoder.state_dict()
    sums = {name: _zeros(weights[f"{name}.weight"]) for name in layers}
    embedding, head = (_zeros(decoder.model.embed_tokens.weight) for _ in range(2))
    final = torch.empty(0)  # inputs of the head [T, E]

    def add(name: str, inputs: Tensor, gradients: Tensor) -> None:
        squares = (gradients.flatten(0, -2).T @ inputs.flatten(0, -2)).float().square_()
        sums[name].add(squares.sum(1), squares.sum(0))

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal final
        final = output.detach().float()

    handle = decoder.model.norm.register_forward_hook(keep)
    try:
        text.embed(decoder.embed)
        with watching(decoder, layers, add):
            for window in track(range(len(text.ids)), "measuring sensitivity"):
                batch = text.batch(slice(window, window + 1))
                p, gradients = backward(decoder, batch, generator)
                squares = gradients[batch.counted].square()
                embedding.rows.index_add_(0, text.ids[window][batch.counted[0]], squares.sum(1))
                embedding.columns += squares.sum(0)
                p.mul_(1 - p)
                head.add(final.square().sum(1) @ p, p.sum(1) @ final.square())
    finally:
        handle.remove()
    sums |= {EMBEDDING_MODULE: embedding, HEAD_MODULE: head}
    return {name: Fisher(total.rows / text.count, total.columns / text.count) for name, total in sums.items()}


def _zeros(weight: Tensor) -> Fisher:
    return Fisher(*(weight.new_zeros(size, dtype=torch.float32) for size in weight.shape))
