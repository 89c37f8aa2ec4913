"""TTT-Linear against its equations, with gradients that autograd takes of the loss, and the artifact against torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffbit.apps.variants.mixers import ttt
from diffbit.models import LayerSpec, ModelConfig
from diffbit.models.attention import softmax
from diffbit.models.mixers import Place
from diffbit.models.mlp import swiglu

OPTIONS = ttt.Options(num_heads=2, head_dim=8, mini_batch=4)
MIXERS = OPTIONS, softmax.Options(2, 1, 8), ttt.Options(2, 8, mini_batch=6)
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    layers=tuple(LayerSpec(mixer, swiglu.Options(64), sub_norms=i == 2) for i, mixer in enumerate(MIXERS)),
    max_position=64,
)


def by_the_book(x: Tensor, module: torch.nn.Module, size: int) -> Tensor:
    """Heads [S, H d] of one sequence x [S, E], in float64: the losses of a mini-batch are minimized as they are."""
    p = {name: parameter.detach().double() for name, parameter in module.named_parameters()}

    def rotated(head: Tensor, place: int) -> Tensor:
        turn = torch.polar(torch.ones(4).double(), place * 10000.0 ** (-torch.arange(4).double() / 4))
        pairs = torch.complex(head[:4], head[4:]) * turn
        return torch.cat((pairs.real, pairs.imag))

    out = []
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        queries, keys, values = (x.double() @ p[f"{name}_proj.weight"][rows].T for name in "qkv")
        rates = (x.double() @ p["rate_proj.weight"][head] + p["rate_proj.bias"][head]).sigmoid() / 8
        gamma, beta = p["norm_weight"][head, 0], p["norm_bias"][head, 0]
        weight, bias = p["initial"][head, :8], p["initial"][head, 8]

        def model(token: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor = gamma, beta: Tensor = beta) -> Tensor:
            return token + F.layer_norm(token @ weight + bias, (8,), gamma, beta, eps=1e-6)

        heads = []
        for begin in range(0, len(x), size):
            sums = [torch.zeros_like(weight), torch.zeros_like(bias)]
            for t in range(begin, min(begin + size, len(x))):
                variables = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
                with torch.enable_grad():
                    error = model(rotated(keys[t], t - begin), *variables) - values[t]
                    gradients = torch.autograd.grad(error.square().sum() / 2, variables)
                sums = [sum_ + rates[t] * gradient for sum_, gradient in zip(sums, gradients, strict=True)]
                factor = max(1 / (t - begin + 1) + float(p["token_rate"][t - begin]), 0)
                now = weight - factor * sums[0], bias - factor * sums[1]
                heads.append(model(rotated(queries[t], t - begin), *now))
            weight, bias = now
        out.append(torch.stack(heads))
    return F.layer_norm(torch.cat(out, -1), (16,), p["post_norm.weight"], p["post_norm.bias"], eps=1e-6)


def test_ttt_is_its_equations() -> None:
    torch.manual_seed(0)
    module = OPTIONS.module(Place(0, 32))
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    x = torch.randn(2, 15, 32)
    heads = module.heads(x, (), None, None, {})
    for row in range(2):
        torch.testing.assert_close(heads[row].double(), by_the_book(x[row], module, 4), rtol=0, atol=2e-5)
    module.initial[:, :, :] = 0.5  # the state matters: it starts from these numbers
    assert (module.heads(x, (), None, None, {}) - heads).abs().max() > 0.1
