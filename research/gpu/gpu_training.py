"""Differential attention with gradients in torch: models/'s own kernels beside compositions of torch's attention.

A candidate takes what a layer's projections give, query and key [1, S, 2H, d] (adjacent pairs: signal, noise), value
[1, S, H, 2d], and lambda float32 [1, H, S], to the normed difference [1, S, H, 2d], causal; forward and backward are
one call. `plain` is the attention of a plain Transformer of the same size: 2H heads of d over values of d.

And whole training steps of models with as many parameters: a plain Transformer of 2H heads, and DIFF versions 1 and 2
of H pairs, through torch's attention and through the kernels of triton_attention.py. A step is
apps/train's for one: float32 weights, bfloat16 autocast, cross entropy of the next tokens, gradients; without the
optimizer, which is the same for all. The sizes are some blocks of the 3B models of arXiv 2410.05258.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from clock import Call
from gpu_peers import WAYS, Attend, attends, joined
from report import say
from torch import Tensor

from diffbit.models import Decoder, ModelConfig, attention_options
from diffbit.models.layers import arithmetic

Differential = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Some = tuple[Tensor, Tensor, Tensor, Tensor]
EPS = 1e-5
COMPILING = 150  # seconds that torch.compile may take
TORCH, KERNEL = "torch", "kernel"
MODELS = (("softmax", TORCH), ("diff_v1", TORCH), ("diff_v1", KERNEL), ("diff_v2", TORCH), ("diff_v2", KERNEL))
VOCABULARY = 1024  # small: the head is the same for all


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


def compositions(tokens: int) -> dict[str, Differential]:
    kernels = attends(tokens).items()
    return {f"{way}: {name}": partial(composed, way, attend) for way in WAYS for name, attend in kernels}


def flex(query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """torch's flex_attention, compiled for these shapes: both branches as a batch of two."""
    say(now="flex_attention", seconds=COMPILING)
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
    q, k, v = by_branch(query), by_branch(key), value.transpose(1, 2)  # [2, H, S, d], [1, H, S, 2d]
    outs = [arithmetic.attend(q[i : i + 1], k[i : i + 1], v, None, query.shape[-1] ** -0.5) for i in range(2)]
    return normed(*joined(outs).float(), lam).to(query.dtype)


def plain(attend: Attend, query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    values = value.unflatten(-1, (2, -1)).flatten(2, 3)  # [1, S, 2H, d]
    out = attend(*(x.transpose(1, 2) for x in (query, key, values)), query.shape[-1] ** -0.5, True)
    return out.transpose(1, 2)


def plains(tokens: int) -> dict[str, Differential]:
    return {f"plain: {name}": partial(plain, attend) for name, attend in attends(tokens).items()}


def kernels(query: Tensor, key: Tensor, value: Tensor, lam: Tensor) -> Tensor:
    """Those of triton_attention.py; imported here, because Triton is not everywhere."""
    from triton_attention import diff_attention

    return diff_attention(query, key, value, lam, query.shape[-1] ** -0.5, EPS)


def inputs(pairs: int, d: int, steps: int, device: str, dtype: torch.dtype) -> Some:
    sizes = ((1, steps, 2 * pairs, d), (1, steps, 2 * pairs, d), (1, steps, pairs, 2 * d))
    query, key, value = (torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes)
    return query, key, value, torch.rand(1, pairs, steps, device=device).requires_grad_()


def forward_backward(function: Differential, some: Some, out_grad: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key, value and lambda where the output's is `wanted`."""
    out = function(*some)
    grads = torch.autograd.grad(out, some, out_grad.view(out.shape).to(out.dtype), allow_unused=True)
    return out.detach(), *(grad for grad in grads if grad is not None)


def call(function: Differential, some: Some) -> Call:
    return partial(forward_backward, function, some, torch.randn_like(some[2]))


def errors(function: Differential, some: Some) -> list[float]:
    """Of the output and of each gradient: relative, against float64; every function is given the same gradient."""
    generator = torch.Generator(some[2].device).manual_seed(0)
    out_grad = torch.randn(some[2].shape, generator=generator, device=some[2].device).to(some[2].dtype)
    query, key, value, lam = (x.detach().double().requires_grad_() for x in some)
    exact = forward_backward(oracle, (query, key, value, lam), out_grad)
    results = forward_backward(function, some, out_grad)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]


# ---- whole steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Sizes of the models; `tokens` are those of a step."""

    hidden: int = 3072
    pairs: int = 12
    layers: int = 4
    tokens: int = 16384

    @property
    def d(self) -> int:
        return self.hidden // self.pairs // 2

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)

    def step(self, attention: str, way: str, length: int, device: str) -> Call:
        """A call is a training step."""
        heads, kv_heads = attention_options(attention).equal_heads(self.pairs)
        config = ModelConfig.uniform(
            vocab_size=VOCABULARY, hidden_size=self.hidden, num_layers=self.layers, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=self.d, intermediate_size=self.hidden * 8 // 3,
            max_position=length, attention=attention, tie_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Decoder(config).to(device)
        if way == KERNEL:
            from triton_attention import use_kernels

            use_kernels(model)
        ids = torch.randint(VOCABULARY, (self.batch(length), length + 1), device=device)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16):
                logits = model(ids[:, :-1])  # [B, S, V]
            F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:]).backward()
            model.zero_grad()

        return step


def peak_mib(step: Call) -> int:
    """What a step allocates above what is there before, where a tensor [S, S] would show; on a CUDA device."""
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20
