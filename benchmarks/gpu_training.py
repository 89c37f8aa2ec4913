"""Differential attention with gradients in torch: models/'s own kernels beside compositions of torch's attention.

A candidate takes what a layer's projections give, query and key [1, S, 2H, d] (adjacent pairs: signal, noise), value
[1, S, H, 2d], and lambda float32 [1, H, S], to the normed difference [1, S, H, 2d], causal; forward and backward are
one call. `plain` is the attention of a plain Transformer of the same size: 2H heads of d over values of d.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from gpu_clock import Call
from gpu_peers import WAYS, Attend, attends, joined
from torch import Tensor

Differential = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Some = tuple[Tensor, Tensor, Tensor, Tensor]
EPS = 1e-5


def by_branch(x: Tensor) -> Tensor:
    """[1, S, 2H, d] -> [2, H, S, d], without a copy."""
    return x[0].unflatten(1, (-1, 2)).permute(2, 1, 0, 3)


def composed(way: str, attend: Attend, query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """One of gpu_peers' ways, with the difference and the norm in float32."""
    triples = WAYS[way](by_branch(query), by_branch(key), value[0].transpose(0, 1))
    outs = [attend(*triple, query.shape[-1] ** -0.5, True) for triple in triples]
    return normed(*joined(outs).float(), lam).to(query.dtype)


def normed(signal: Tensor, noise: Tensor, lam: Tensor) -> Tensor:
    """Both [H, S, 2d] -> [1, S, H, 2d]."""
    difference = signal - lam[0, ..., None] * noise
    return F.rms_norm(difference, difference.shape[-1:], eps=EPS).transpose(0, 1)[None]


def oracle(query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """The same by definition, with all scores: for few tokens, in any precision."""
    scores = by_branch(query) @ by_branch(key).transpose(-1, -2) * query.shape[-1] ** -0.5  # [2, H, S, S]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    shares = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return normed(*(shares @ value[0].transpose(0, 1)), lam)


def compositions() -> dict[str, Differential]:
    return {f"{way}: {name}": partial(composed, way, attend) for way in WAYS for name, attend in attends().items()}


def flex(query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """torch's flex_attention, compiled for these shapes: both branches as a batch of two."""
    q, k, v = by_branch(query), by_branch(key), value.transpose(1, 2)  # [2, H, S, d], [1, H, S, 2d]
    outs = _flex(q.shape[2], query.device.type)(q, k, v.expand(2, -1, -1, -1))
    return normed(*outs.float(), lam).to(query.dtype)


@cache
def _flex(steps: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, steps, steps, device=device)
    return torch.compile(partial(flex_attention, block_mask=blocks), dynamic=False)


def layers(query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """What a layer of models/ does where it does not use `kernels`."""
    from diffbit.models.softmax import attend

    q, k, v = by_branch(query), by_branch(key), value.transpose(1, 2)  # [2, H, S, d], [1, H, S, 2d]
    outs = [attend(q[i : i + 1], k[i : i + 1], v, None, query.shape[-1] ** -0.5) for i in range(2)]
    return normed(*joined(outs).float(), lam).to(query.dtype)


def plain(attend: Attend, query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    values = value.unflatten(-1, (2, -1)).flatten(2, 3)  # [1, S, 2H, d]
    out = attend(*(x.transpose(1, 2) for x in (query, key, values)), query.shape[-1] ** -0.5, True)
    return out.transpose(1, 2)


def plains() -> dict[str, Differential]:
    return {name: partial(plain, attend) for name, attend in attends().items()}


def kernels(query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """models/'s own in Triton; imported here, because Triton is not everywhere."""
    from diffbit.models.triton_attention import diff_attention

    return diff_attention(query, key, value, lam, query.shape[-1] ** -0.5, EPS)


def inputs(pairs: int, d: int, steps: int, device: str, dtype: torch.dtype) -> Some:
    sizes = ((1, steps, 2 * pairs, d), (1, steps, 2 * pairs, d), (1, steps, pairs, 2 * d))
    query, key, value = (torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes)
    return query, key, value, torch.rand(1, pairs, steps, device=device).requires_grad_()


def forward_backward(function: Differential, some: Some, wanted: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key, value and lambda where the output's is `wanted`."""
    out = function(*some)
    grads = torch.autograd.grad(out, some, wanted.view(out.shape).to(out.dtype), allow_unused=True)
    return out.detach(), *(grad for grad in grads if grad is not None)


def call(function: Differential, some: Some) -> Call:
    return partial(forward_backward, function, some, torch.randn_like(some[2]))


def errors(function: Differential, some: Some) -> list[float]:
    """Of the output and of each gradient: relative, against float64."""
    wanted = torch.randn_like(some[2])
    query, key, value, lam = (x.detach().double().requires_grad_() for x in some)
    exact = forward_backward(oracle, (query, key, value, lam), wanted)
    found = forward_backward(function, some, wanted)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
