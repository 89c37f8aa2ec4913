"""Describes a model's cache: a list of buffers for each layer. Needs only the standard library.

A layer of grouped-query attention has the buffers `key` and `value`, whose capacity grows with the context; a recurrent
layer has buffers of fixed size; a layer that reads another layer's keys and values has none. An artifact's manifest
lists the buffers, and session, generate, verify and bench use nothing else about the cache.

A dimension is a number, "tokens" (one entry per token of capacity) or "tokens/32" (one per 32 tokens). A ring has a
fixed size n: entry i is stored at i mod n, written "tokens%n" or "tokens/32%n".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from ..io.fields import Rule, of_length, one_of
from .kv_cache import BLOCK, quantized_tokens

TOKENS = "tokens"
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}  # bytes of a buffer's numbers
IN_PLACE = ("always", "native", "never")
MAX_DIMENSIONS, MAX_BLOCK = 5, 1024
_DIMENSION = re.compile(TOKENS + r"(/(?P<block>[0-9]{1,9}))?(%(?P<ring>[0-9]{1,9}))?")


def _is_dimension(dim: int | str) -> bool:
    if isinstance(dim, int):
        return 1 <= dim < 1 << 31
    match = _DIMENSION.fullmatch(dim)
    return match is not None and 1 <= int(match["block"] or 1) <= MAX_BLOCK and int(match["ring"] or 1) >= 1


BufferName = Annotated[str, Rule("lower-case letters, digits and _", re.compile(r"[a-z][a-z0-9_]{0,39}").fullmatch)]
Dimension = Annotated[
    int | str, Rule(f"a number above 0, '{TOKENS}', '{TOKENS}/32' or, of a ring, '{TOKENS}%512'", _is_dimension)
]


@dataclass(frozen=True)
class Buffer:
    """One buffer of a layer, [B, *shape]: the graph's input past_key_values.N.<name> and its output present.N.<name>.

    in_place: whether one buffer of full capacity may be bound as past and as present: "always", "native" (only if the
    native library runs the layer) or "never". If not, a growing present is longer than the past by the call's tokens.
    """

    name: BufferName
    dtype: Annotated[str, one_of(*WIDTHS)]
    shape: Annotated[tuple[Dimension, ...], of_length(1, MAX_DIMENSIONS)]
    in_place: Annotated[str, one_of(*IN_PLACE)] = "never"

    @property
    def multiple(self) -> int:
        """Capacities must be multiples of this number of tokens."""
        if self.name.endswith("_recent"):  # tokens that leave the window are quantized in whole blocks
            return BLOCK
        return math.lcm(*(tokens_each(dim) for dim in self.shape if isinstance(dim, str) and not ring_of(dim)))

    @property
    def grows(self) -> bool:
        return None in self.fixed

    @property
    def ring(self) -> int:
        """Entries of its ring; 0: it is not a ring."""
        return max(ring_of(dim) for dim in self.shape)

    @property
    def holds_tokens(self) -> bool:
        """Whether it stores tokens, so that entries behind them are never read; a state is read as a whole."""
        return self.grows or self.ring > 0 or self.name.endswith("_recent")

    @property
    def fixed(self) -> tuple[int | None, ...]:
        """The shape without the batch; None for growing dimensions."""
        return tuple(dim if isinstance(dim, int) else ring_of(dim) or None for dim in self.shape)

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """The shape for a capacity of `tokens`, a multiple of `multiple`, without the batch."""
        return tuple(dim if isinstance(dim, int) else ring_of(dim) or tokens // tokens_each(dim) for dim in self.shape)

    def first(self, tokens: int, start: int = 0) -> tuple[slice, ...]:
        """Where the first `tokens` are, from `start` on, in a buffer without the batch; in one of fixed size, all of
        it."""
        each = (size or tokens_each(str(dim)) for dim, size in zip(self.shape, self.fixed, strict=True))
        return tuple(
            slice(one) if size else slice(start // one, -(-tokens // one))
            for one, size in zip(each, self.fixed, strict=True)
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of one sequence."""
        return WIDTHS[self.dtype] * math.prod(self.sizes(tokens))


def tokens_each(dim: str) -> int:
    """Return the tokens per entry of a dimension: 1 for "tokens", 32 for "tokens/32"."""
    return int(dim.partition("%")[0].partition("/")[2] or 1)


def ring_of(dim: int | str) -> int:
    """Return the entries of a ring: 16 for "tokens/32%16"; 0 for other dimensions."""
    return int(dim.partition("%")[2] or 0) if isinstance(dim, str) else 0


@dataclass(frozen=True)
class CacheSpec:
    """`layers[i]`: the buffers of layer i, possibly none."""

    layers: tuple[tuple[Buffer, ...], ...]

    @property
    def buffers(self) -> dict[str, Buffer]:
        """ "N.name" -> buffer, as the graph's inputs and outputs are named, in their order."""
        return {f"{index}.{buffer.name}": buffer for index, layer in enumerate(self.layers) for buffer in layer}

    @property
    def multiple(self) -> int:
        return math.lcm(*(buffer.multiple for layer in self.layers for buffer in layer))

    def capacity(self, tokens: int) -> int:
        """Return the smallest valid capacity for so many tokens."""
        return -(-tokens // self.multiple) * self.multiple

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of one sequence with a capacity of so many tokens."""
        capacity = self.capacity(tokens)
        return sum(buffer.nbytes(capacity) for layer in self.layers for buffer in layer)

    def holds(self, kept: int, length: int) -> bool:
        """Whether buffers written in place with `length` tokens can be cut to the first `kept`.

        This holds if a row is a token. In a low-bit cache, `kept` and `length` must have the same number of quantized
        tokens (kv_cache.py), because the residual window has the others. The ring of a sliding window has overwritten
        tokens that the next one after `kept` would see, unless it had room for all of `length`, or only one token is
        cut. A state cannot be cut.
        """
        for layer in self.layers:
            recent = {buffer.name: int(buffer.shape[1]) - BLOCK for buffer in layer if buffer.name.endswith("_recent")}
            if any(quantized_tokens(kept, window) != quantized_tokens(length, window) for window in recent.values()):
                return False
            for buffer in layer:
                blockwise = f"{buffer.name.partition('_')[0]}_recent" in recent  # its quantized tokens are the same
                if not buffer.holds_tokens or (buffer.ring and not blockwise and kept + 1 < length > buffer.ring):
                    return False
        return True

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of one sequence that do not depend on its length: states, and residual windows."""
        return self.nbytes(0)

    @property
    def bytes_per_1k_tokens(self) -> int:
        """Return the bytes of one sequence per 1000 tokens, without the fixed ones."""
        return (self.nbytes(self.multiple) - self.fixed_bytes) * 1000 // self.multiple

    def longest(self, nbytes: int) -> int | None:
        """Return the tokens of the longest sequence whose cache fits in `nbytes`; None if the cache does not grow."""
        growth = self.nbytes(self.multiple) - self.fixed_bytes
        return max(0, nbytes - self.fixed_bytes) // growth * self.multiple if growth else None
