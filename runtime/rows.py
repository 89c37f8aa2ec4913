"""The caches of several texts that share a session's weights: each text is a row of one batch, in buffers of the
caller's. Who puts which tokens where is the caller's matter (apps/serve/batch.py); a run only reads a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError
from ..ops.cache import TOKENS
from .session import Logits, Session, zeros


class RowCaches:
    """Zeroed caches of `count` rows, each of the session's capacity.

    arrays: {buffer: [count, ...]}, written in place by `run`; axes: the axis of the tokens in each. Raises DiffbitError
    if the system cannot map them.
    """

    def __init__(self, session: Session, count: int) -> None:
        too_many = DiffbitError(f"{count} rows of {session.capacity} tokens are too many; use fewer rows")
        if count * session.capacity > 1 << 31:
            raise too_many
        capacity = session.artifact.cache.capacity(session.capacity)
        buffers = session.artifact.cache.buffers
        self.axes = {name: 1 + buffer.shape.index(TOKENS) for name, buffer in buffers.items()}
        try:
            self.arrays: dict[str, NDArray[Any]] = {
                name: zeros((count, *buffer.sizes(capacity)), buffer.dtype) for name, buffer in buffers.items()
            }
        except (OSError, OverflowError, MemoryError):  # more than the system can map
            raise too_many from None
        self._session, self._binding = session, session.io_binding()
        self._bound = slice(0, 0)  # the rows that the binding reads and writes

    @staticmethod
    def fit(session: Session) -> bool:
        """Whether the session's cache allows rows: buffers that are written in place and store each token separately
        (float and int8 caches, on a CPU, with the native library)."""
        buffers = session.artifact.cache.buffers.values()
        per_token = all(TOKENS in buffer.shape and buffer.multiple == 1 for buffer in buffers)
        return per_token and session.native and session.device == "cpu"

    def run(self, rows: slice, ids: NDArray[np.int64], mask: NDArray[np.int64], positions: NDArray[np.int64]) -> Logits:
        """Append ids [n, S] to the rows as the last S of the T slots of mask [n, T]; return the logits [n, V] after the
        last."""
        if rows != self._bound:
            for name, cache in self.arrays.items():
                part = cache[rows]
                for bind, side in (
                    (self._binding.bind_input, "past_key_values"),
                    (self._binding.bind_output, "present"),
                ):
                    bind(f"{side}.{name}", "cpu", 0, part.dtype.type, part.shape, part.ctypes.data)
            self._bound = rows
        return self._session.run(self._binding, ids, mask, positions, last=True)[:, -1]
