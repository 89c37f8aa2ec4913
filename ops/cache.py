"""Describes a model's cache: a list of buffers for each layer. Needs only the standard library.

A layer of grouped-query attention has the buffers `key` and `value`, whose capacity grows with the context; a recurrent
layer has buffers of fixed size; a layer that reads another layer's keys and values has none. An artifact's manifest
lists the buffers, and session, generate, verify and bench use nothing else about the cache.

A dimension is a number or "tokens", one entry per token of capacity. A ring has a fixed size n: token t is stored at
t mod n, written "tokens%n".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated

from ..io.fields import OMITTED, Rule, bounds, of_length, one_of
from .kv_cache import BLOCK, quantized_tokens

TOKENS = "tokens"
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}  # bytes of a buffer's numbers
IN_PLACE = ("always", "native", "never")
MAX_DIMENSIONS = 5
_DIMENSION = re.compile(TOKENS + r"(%(?P<ring>[0-9]{1,9}))?")


def _is_dimension(dim: int | str) -> bool:
    if isinstance(dim, int):
        return 1 <= dim < 1 << 31
    match = _DIMENSION.fullmatch(dim)
    return match is not None and int(match["ring"] or 1) >= 1


BufferName = Annotated[str, Rule("lower-case letters, digits and _", re.compile(r"[a-z][a-z0-9_]{0,39}").fullmatch)]
Dimension = Annotated[int | str, Rule(f"a number above 0, '{TOKENS}' or, of a ring, '{TOKENS}%512'", _is_dimension)]


@dataclass(frozen=True)
class Buffer:
    """One buffer of a layer, [B, *shape]: the graph's input past_key_values.N.<name> and its output present.N.<name>.

    in_place: whether one buffer of full capacity may be bound as past and as present: "always", "native" (only if the
    native library runs the layer) or "never". If not, a growing present is longer than the past by the call's tokens.
    window: of a low-bit cache (kv_cache.py), how many recent tokens stay float16 at least; None: of another.
    """

    name: BufferName
    dtype: Annotated[str, one_of(*WIDTHS)]
    shape: Annotated[tuple[Dimension, ...], of_length(1, MAX_DIMENSIONS)]
    in_place: Annotated[str, one_of(*IN_PLACE)] = "never"
    window: Annotated[int, bounds(0)] | None = field(default=None, metadata=OMITTED)

    @property
    def multiple(self) -> int:
        """Capacities must be multiples of this number of tokens."""
        return 1 if self.window is None else BLOCK  # tokens leave the window in whole blocks

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
        return self.grows or self.ring > 0 or self.window is not None

    @property
    def fixed(self) -> tuple[int | None, ...]:
        """The shape without the batch; None for growing dimensions."""
        return tuple(dim if isinstance(dim, int) else ring_of(dim) or None for dim in self.shape)

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """The shape for a capacity of `tokens`, a multiple of `multiple`, without the batch."""
        return tuple(tokens if size is None else size for size in self.fixed)

    def first(self, tokens: int, start: int = 0) -> tuple[slice, ...]:
        """Where the first `tokens` are, from `start` on, in a buffer without the batch; in one of fixed size, all of
        it."""
        return tuple(slice(start, tokens) if size is None else slice(size) for size in self.fixed)

    def nbytes(self, tokens: int) -> int:
        """Bytes of one sequence."""
        return WIDTHS[self.dtype] * math.prod(self.sizes(tokens))


def ring_of(dim: int | str) -> int:
    """Return the entries of a ring: 512 for "tokens%512"; 0 for other dimensions."""
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
        return max((buffer.multiple for layer in self.layers for buffer in layer), default=1)

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
        tokens (kv_cache.py), because the residual window has the others. Another ring has overwritten tokens that the
        next one after `kept` would see, unless it had room for all of `length`, or only one token is cut. A state
        cannot be cut.
        """
        for buffer in self.buffers.values():
            if buffer.window is not None:
                if quantized_tokens(kept, buffer.window) != quantized_tokens(length, buffer.window):
                    return False
            elif not buffer.holds_tokens or (buffer.ring and kept + 1 < length > buffer.ring):
                return False
        return True

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of one sequence that do not depend on its length: states, and the float16 tokens of low-bit
        caches."""
        return self.nbytes(0)

    @property
    def bytes_per_1k_tokens(self) -> int:
        """Return the bytes of one sequence per 1000 tokens, without the fixed ones."""
        return (self.nbytes(self.multiple) - self.fixed_bytes) * 1000 // self.multiple

    def longest(self, nbytes: int) -> int | None:
        """Return the tokens of the longest sequence whose cache fits in `nbytes`; None if the cache does not grow."""
        growth = self.nbytes(self.multiple) - self.fixed_bytes
        return max(0, nbytes - self.fixed_bytes) // growth * self.multiple if growth else None
