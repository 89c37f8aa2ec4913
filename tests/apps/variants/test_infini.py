"""Infini-attention against its equations, token by token, and the artifact against torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffbit.apps.variants.mixers import infini
from diffbit.models import LayerSpec, ModelConfig, rope_for
from diffbit.models.attention import softmax
from diffbit.models.mixers import Place
from diffbit.models.mlp import swiglu

OPTIONS = infini.Options(num_heads=2, head_dim=8, segment=4)
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    layers=tuple(
        LayerSpec(mixer, swiglu.Options(64), sub_norms=bool(norms))
        for mixer, norms in (
            (OPTIONS, False),
            (softmax.Options(2, 1, 8), False),
            (infini.Options(2, 8, segment=6), True),
        )
    ),
    max_position=64,
)


def by_the_book(x: Tensor, module: torch.nn.Module, segment: int) -> Tensor:
    """Heads [S, H d] of one sequence x [S, E], in float64: a head, a segment and a token at a time."""
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    frequencies = [10000 ** (-j / 4) for j in range(4)]

    def rotated(head: Tensor, position: int) -> Tensor:
        cos, sin = (torch.tensor([f(position * w) for w in frequencies]).double() for f in (math.cos, math.sin))
        return torch.cat((head[:4] * cos - head[4:] * sin, head[4:] * cos + head[:4] * sin))

    def positive(head: Tensor) -> Tensor:
        return torch.where(head > 0, head + 1, head.exp())

    out = []
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        queries, keys, values = (x.double() @ weights[f"{name}_proj.weight"][rows].T for name in "qkv")
        gate = 1 / (1 + math.exp(-weights["beta"][head]))
        memory, norm = torch.zeros(8, 8).double(), torch.zeros(8).double()
        heads = []
        for begin in range(0, len(x), segment):
            for t in range(begin, min(begin + segment, len(x))):
                query = rotated(queries[t], t - begin)
                logits = [float(query @ rotated(keys[s], s - begin)) / math.sqrt(8) for s in range(begin, t + 1)]
                local = torch.tensor(logits).double().softmax(0) @ values[begin : t + 1]
                long = positive(queries[t])
                read = long @ memory / (long @ norm) if begin else torch.zeros(8).double()
                heads.append(gate * read + (1 - gate) * local)
            delta = torch.zeros(8, 8).double()
            for t in range(begin, min(begin + segment, len(x))):
                long = positive(keys[t])
                delta += torch.outer(long, values[t] - (long @ memory / (long @ norm) if begin else 0))
            memory = memory + delta
            norm = norm + sum(positive(key) for key in keys[begin : begin + segment])
        out.append(torch.stack(heads))
    return torch.cat(out, -1)


def test_infini_is_its_equations() -> None:
    torch.manual_seed(0)
    module = OPTIONS.module(Place(0, 32))
    for parameter in module.parameters():
        parameter.normal_(0, 0.4)
    x = torch.randn(2, 15, 32)
    heads = module.heads(x, rope_for(CONFIG, torch.arange(15).expand(2, 15)), None, None, {})
    for row in range(2):
        torch.testing.assert_close(heads[row].double(), by_the_book(x[row], module, 4), rtol=0, atol=1e-5)
