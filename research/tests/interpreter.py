"""Triton's interpreter, which runs kernels on a CPU (tests/conftest.py turns it on), with the arithmetic of bfloat16
that it lacks: its products take such a number's two bytes for an integer, and its conversion cuts float32 off instead
of rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def bfloat16() -> Iterator[None]:
    """Right products and conversions."""
    import triton.language as tl
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        product, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

        def widened(handle: Any) -> Any:
            if handle.dtype.scalar != tl.bfloat16:
                return handle
            return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
            return product(builder, widened(a), widened(b), *rest)

        def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
            if (source, target) != (tl.float32, tl.bfloat16):
                return convert(values, source, target, mode)
            halves = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
            return halves.view(torch.int16).numpy().view(np.uint16)

        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
