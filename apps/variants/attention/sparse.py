"""Softmax attention over a pattern of keys: a window and first tokens, random blocks, or dilated segments.

    A_h = softmax(q_h k_g^T / sqrt d + log n_h(t, s))     n_h: how often head h's query t sees key s <= t; 0: never

t and s are positions, counted over real tokens. `pattern` says what n is:

    window     1 if t - s < window, or s < first: a window with global first tokens (Longformer, arXiv 2004.05150,
               section 3.1; such tokens are also the attention sinks of 2309.17453)
    random     the same, or if s is in one of `random_blocks` earlier blocks that the block of t has drawn (BigBird,
               2007.14062, section 2). They are drawn by a fixed rule, a ((i + 1) P_n mod M) mod M mod i for block i, so
               that training, every call and every device see the same; a draw may repeat another, or the window
    dilated    how many of the `segments` (w, r) have t and s in one segment, t // w = s // w, and both in the head's
               part of it, t = s = h (mod r) (LongNet, 2307.02486, eq. 5-10). LongNet weights the outputs of its
               segments by their softmax denominators, which is one softmax in which a key counts n times

The pattern saves no time here: the body computes all logits (_biased.py), a kernel would skip whole blocks. Nor does it
save memory: with first tokens a cache would need a part that stays and a part that turns, which caches do not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from ....io.errors import DiffbitError
from ....io.fields import Count, bounds, of_length, one_of
from ....models.attention import softmax
from ....models.mixers import Graph, Place, Value
from ._biased import Biased, BiasedOptions

PATTERNS = ("window", "random", "dilated")
PRIMES, FACTOR, MODULUS = (1000000007, 998244353, 1073741789, 1500450271), 48271, (1 << 31) - 1  # P_n, a and M
HIDDEN = -1e30


@dataclass(frozen=True)
class Options(BiasedOptions, softmax.Options):
    """window, first, block: in tokens. segments: (tokens, dilation), of which one must have dilation 1."""

    pattern: Annotated[str, one_of(*PATTERNS)] = field(default="window", kw_only=True)
    window: Count = field(default=32, kw_only=True)
    first: Annotated[int, bounds(0, 1 << 31)] = field(default=4, kw_only=True)
    block: Count = field(default=16, kw_only=True)
    random_blocks: Annotated[int, bounds(1, len(PRIMES))] = field(default=2, kw_only=True)
    segments: Annotated[tuple[tuple[Count, Count], ...], of_length(1, 16)] = field(
        default=((32, 1), (64, 2), (128, 4)), kw_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if all(dilation > 1 for _, dilation in self.segments):
            raise DiffbitError(f"segments are {self.segments}, wanted one of dilation 1: else tokens see no key")

    def module(self, place: Place) -> Sparse:
        return Sparse(self, place)


class Sparse(Biased, softmax.Softmax):
    def __init__(self, options: Options, place: Place) -> None:
        super().__init__(options, place)
        self.options = options
        self.drawing = PRIMES[: options.random_blocks] if options.pattern == "random" else ()

    def bias_of(self, query: Tensor, key: Tensor) -> Tensor:
        sizes = self.options
        if sizes.pattern == "dilated":
            head = torch.arange(self.num_heads, device=key.device)[:, None, None]
            parts = [
                (query // w == key // w) & (query % r == head % r) & (key % r == head % r) for w, r in sizes.segments
            ]
            return torch.stack(parts).sum(0).float().log().clamp(min=HIDDEN)
        seen = (query - key < sizes.window) | (key < sizes.first)
        block = query // sizes.block
        for prime in self.drawing:
            drawn = (block + 1) * prime % MODULUS * FACTOR % MODULUS % block.clamp(min=1)
            seen = seen | (key // sizes.block == drawn)
        return torch.zeros(seen.shape, device=key.device).masked_fill(~seen, HIDDEN)

    def onnx_bias_of(self, g: Graph, query: Value, key: Value) -> Value:
        sizes = self.options

        def op(name: str, *inputs: Value | int) -> Value:
            return g.op(name, [g.const(x) if isinstance(x, int) else x for x in inputs])

        if sizes.pattern == "dilated":
            count, heads = g.const(0, np.float32), np.arange(self.num_heads)[:, None, None]
            for w, r in sizes.segments:
                part = op("Equal", op("Div", query, w), op("Div", key, w))
                for tokens in (query, key):
                    part = op("And", part, op("Equal", op("Mod", tokens, r), g.const(heads % r)))
                count = op("Add", count, g.cast(part, np.float32))
            return op("Max", op("Log", count), g.const(HIDDEN, np.float32))
        seen = op("Or", op("Less", op("Sub", query, key), sizes.window), op("Less", key, sizes.first))
        block = op("Div", query, sizes.block)
        for prime in self.drawing:
            drawn = op("Mod", op("Mul", op("Add", block, 1), prime), MODULUS)
            drawn = op("Mod", op("Mod", op("Mul", drawn, FACTOR), MODULUS), op("Max", block, 1))
            seen = op("Or", seen, op("Equal", op("Div", key, sizes.block), drawn))
        return op("Where", seen, g.const(0, np.float32), g.const(HIDDEN, np.float32))
