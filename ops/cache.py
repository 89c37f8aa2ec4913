"""What holds a model's past between calls: for each layer a list of buffers, described without any library.

A layer of grouped-query attention has the buffers `key` and `value`, whose capacity grows with the context; one with a
recurrent state has buffers of fixed size; one that reads another layer's keys and values has none. The manifest of an
artifact lists them, and session, generate, verify and bench read nothing else about the cache.

A dimension is a number, "tokens" (one entry for each token of capacity) or "tokens/32" (one for each 32 tokens). A ring
has a fixed size: entry i of what its axis counts lies at i mod n, "tokens%n" or "tokens/32%n".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .kv_cache import BLOCK, quantized_tokens

TOKENS = "tokens"
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}  # bytes of a buffer's numbers
IN_PLACE = ("always", "native", "never")


@dataclass(frozen=True)
class Buffer:
    """One buffer of a layer, [B, *shape]: the graph's input past_key_values.N.<name> and its output present.N.<name>.

    in_place: whether one memory of full capacity may be bound as past and as present: "always", "native" (only where
    the native library runs the layer) or "never". Where it may not, a present that grows is longer than the past by
    the tokens of the call.
    """

    name: str
    dtype: str  # a key of WIDTHS
    shape: tuple[int | str, ...]
    in_place: str = "never"

    @property
    def multiple(self) -> int:
        """Capacities are multiples of this many tokens."""
        if self.name.endswith("_recent"):  # the tokens that leave the window are quantized in whole blocks
            return BLOCK
        return math.lcm(*(tokens_each(dim) for dim in self.shape if isinstance(dim, str) and not ring_of(dim)))

    @property
    def grows(self) -> bool:
        return None in self.fixed

    @property
    def ring(self) -> int:
        """Entries of its ring; 0: it is none."""
        return max(ring_of(dim) for dim in self.shape)

    @property
    def holds_tokens(self) -> bool:
        """Is what lies behind the tokens that it holds never read? A state is always read."""
        return self.grows or self.ring > 0 or self.name.endswith("_recent")

    @property
    def fixed(self) -> tuple[int | None, ...]:
        """The shape without the batch, None what grows."""
        return tuple(dim if isinstance(dim, int) else ring_of(dim) or None for dim in self.shape)

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """The shape for a capacity of `tokens`, a multiple of `multiple`, without the batch."""
        return tuple(dim if isinstance(dim, int) else ring_of(dim) or tokens // tokens_each(dim) for dim in self.shape)

    def nbytes(self, tokens: int) -> int:
        """Bytes of one sequence."""
        return WIDTHS[self.dtype] * math.prod(self.sizes(tokens))


def tokens_each(dim: str) -> int:
    """Tokens for each entry of a dimension: 1 of "tokens", 32 of "tokens/32"."""
    return int(dim.partition("%")[0].partition("/")[2] or 1)


def ring_of(dim: int | str) -> int:
    """Entries of a ring: 16 of "tokens/32%16"; 0 of another dimension."""
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
        """The least capacity that holds so many tokens."""
        return -(-tokens // self.multiple) * self.multiple

    def nbytes(self, tokens: int) -> int:
        """Bytes of one sequence, with room for so many tokens."""
        capacity = self.capacity(tokens)
        return sum(buffer.nbytes(capacity) for layer in self.layers for buffer in layer)

    def holds(self, kept: int, length: int) -> bool:
        """Whether buffers written in place that hold `length` tokens are those of the first `kept` with more behind.

        So it is where a row is a token. Of a low-bit cache, neither number may have another count of quantized tokens
        (kv_cache.py): the residual window has the others. A ring of a sliding window has dropped what the token behind
        `kept` would see, unless it had room for all of `length` or lacks one token only. A state is only that of
        `length`.
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
        """Bytes of one sequence, whatever its length: states, and the recent tokens that a low-bit cache keeps."""
        return self.nbytes(0)

    @property
    def bytes_per_1k_tokens(self) -> int:
        """Bytes of one sequence for each 1000 tokens, without the fixed ones."""
        return (self.nbytes(self.multiple) - self.fixed_bytes) * 1000 // self.multiple

    def longest(self, nbytes: int) -> int | None:
        """Tokens of the longest sequence whose cache takes so many bytes at most; None where it does not grow."""
        growth = self.nbytes(self.multiple) - self.fixed_bytes
        return max(0, nbytes - self.fixed_bytes) // growth * self.multiple if growth else None
