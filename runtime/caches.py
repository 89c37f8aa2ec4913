"""The cache of a batch of rows: it owns the buffers that a graph reads and writes, knows which tokens are in them, and
decides which of these tokens the next text reuses.

If the graph can write into its input (`in_place` in the manifest), one OrtValue of full capacity is bound both as past
and as present, and a decode step writes one row into it. Otherwise the graph returns a new present (longer than the
past by the new tokens, or a state or a ring of the same size), which is bound as the past of the next call. Neither way
copies the cache to numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops.cache import CacheSpec
from .memory import zeros
from .providers import Binding, OrtValue, onnxruntime

Ids = NDArray[np.int64]


class Cache:
    """Rows of at most `capacity` tokens; `begin` makes them. binding: ONNX Runtime's, with the logits as its first
    output; memory: of the device; native: whether the native library runs the layers."""

    def __init__(self, spec: CacheSpec, capacity: int, binding: Binding, memory: str, native: bool) -> None:
        self.spec, self.capacity, self.binding, self._memory = spec, capacity, binding, memory
        self.buffers, ways = spec.buffers, ("always", "native") if native else ("always",)
        self._in_place = {name for name, buffer in self.buffers.items() if buffer.in_place in ways}
        self.forget()

    def forget(self) -> None:
        """Give up all rows and their memory."""
        self.rows, self._bound, self.past = 0, slice(0, 0), dict[str, OrtValue]()
        self.arrays: dict[str, NDArray[Any]] = {}  # [rows, ...], in place in the CPU's memory

    def begin(self, rows: int, block: int) -> None:
        """Make `rows` empty rows, whose tokens are reused in blocks of `block`. If there are as many rows already,
        in-place buffers of tokens stay: slots after the tokens are not read. Raises OSError, OverflowError, ValueError,
        MemoryError, or exceptions of ONNX Runtime's, if the memory has no room."""
        if self._bound != slice(0, rows):
            self.forget()
            self.ids: Ids = np.zeros((rows, self.capacity), np.int64)
        self.block = block
        self.lengths, self.whole = np.zeros((2, rows), np.int64)  # tokens of each row; those computed in whole blocks
        self.recent: list[dict[int, Any]] = [{} for _ in range(rows)]  # by length: what else a row can be cut to
        capacity = self.spec.capacity(self.capacity)
        for name, buffer in self.buffers.items():
            in_place = name in self._in_place
            if not (in_place and buffer.holds_tokens and name in self.past):
                array = zeros((rows, *buffer.sizes(capacity if in_place else 0)), buffer.dtype)
                self._bind(name, onnxruntime().OrtValue.ortvalue_from_numpy(array, self._memory, 0))
                if in_place and self._memory == "cpu":
                    self.arrays[name] = array
        self.rows, self._bound = rows, slice(0, rows)

    def bind(self, rows: slice) -> None:
        """Let the graph read and write these rows only. The cache must be in place in the CPU's memory."""
        if rows != self._bound:
            self._bound = slice(0, 0)  # if a buffer cannot be bound, no rows are
            for name, array in self.arrays.items():
                self._bind(name, onnxruntime().OrtValue.ortvalue_from_numpy(array[rows], self._memory, 0))
            self._bound = rows

    def _bind(self, name: str, value: OrtValue) -> None:
        # in the order of the names: the binding returns its outputs in the order of their first binding
        self.past[name] = value
        self.binding.bind_ortvalue_input(f"past_key_values.{name}", value)
        if name in self._in_place:
            self.binding.bind_ortvalue_output(f"present.{name}", value)
        else:
            self.binding.bind_output(f"present.{name}", self._memory)

    def follow(self) -> None:
        """Let the graph's next call continue what this one has returned."""
        if len(self._in_place) < len(self.buffers):
            for name, value in zip(self.buffers, self.binding.get_outputs()[1:], strict=True):
                if name not in self._in_place:
                    self._bind(name, value)

    def append(self, row: int, start: int, ids: Ids) -> None:
        """Note that a row holds `ids` [S] after its first `start` tokens."""
        end = start + len(ids)
        self.ids[row, start:end], self.lengths[row] = ids, end
        if start == self.whole[row] and not len(ids) % self.block:
            self.whole[row] = end

    def reusable(self, row: int, ids: Ids) -> tuple[int, int]:
        """Return how many tokens of a prompt a row holds, in whole blocks, and the largest number of these that it can
        be cut to. A cache that is not all in place is reused entirely or not at all."""
        length = int(self.lengths[row])
        differ = self.ids[row, : min(length, len(ids))] != ids[:length]
        equal = int(differ.argmax()) if differ.any() else len(differ)
        if self.block > 1:
            equal = min(equal, int(self.whole[row])) // self.block * self.block
        if equal == length or (len(self._in_place) == len(self.buffers) and self.spec.holds(equal, length)):
            return equal, equal
        return equal, max((count for count in self.recent[row] if count <= equal), default=0)

    def keep(self, row: int, source: int, count: int) -> None:
        """Note that a row holds the first `count` tokens of `source`, which may be the row itself."""
        self.ids[row, :count] = self.ids[source, :count]
        self.recent[row] = {length: recent for length, recent in self.recent[source].items() if length <= count}
        self.lengths[row], self.whole[row] = count, min(count, int(self.whole[source]))
