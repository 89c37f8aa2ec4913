"""Run a CUDA kernel: compiled for the CPU, with its threads in several orders (emulate.h), or on a card.

@on_each_device                     # or on_devices_in_turn(cases)
def test_kernel(device: Device, ...) -> None:
    a, y = device.put(a), device.poisoned(a.shape, a.dtype)
    device.run(cuda.Hadamard(a=a.data_ptr(), y=y.data_ptr(), ...))
    assert torch.equal(y.cpu(), wanted)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from diffbit.runtime import native

from ..native import cuda
from ..native.host import emulated

POISON = 0xFF  # of such bytes, floats and halves are NaN
TYPES = {torch.float32: cuda.FLOAT32, torch.float16: cuda.FLOAT16, torch.bfloat16: cuda.BFLOAT16}
GUARD = 256  # bytes behind a buffer that nobody may write


@functools.cache
def _kernels(device: str) -> cuda.Kernels:
    library = emulated() if device == "cpu" else native.library()
    assert library is not None, "the package was installed without its library"
    return cuda.Kernels(library)


@dataclass(frozen=True)
class Device:
    name: str  # torch's
    seed: int = 0  # of the order of threads, where they are emulated

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of it there, dense."""
        return tensor.detach().clone(memory_format=torch.contiguous_format).to(self.name)

    def poisoned(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that nobody has written."""
        return (
            torch.full((torch.Size(shape).numel() * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.name)
            .view(dtype)
            .view(shape)
        )

    def run(self, op: cuda.Op) -> None:
        """The op, done; its workspace holds NaN before, and behind it nothing is written."""
        kernels = _kernels(self.name)
        with mock.patch.dict(os.environ, {"DIFFBIT_EMULATE_SEED": str(self.seed)}):
            size = kernels.workspace(op)
            room = self.poisoned((size + GUARD,), torch.uint8)
            stream = 0 if self.name == "cpu" else torch.cuda.current_stream().cuda_stream
            kernels.run(op, room.data_ptr(), stream)
        if self.name == "cuda":
            torch.cuda.synchronize()
        assert bool((room[size:] == POISON).all()), "something was written behind the workspace"


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
on_each_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(Device("cpu", seed=0), id="emulated", marks=pytest.mark.slow),
        pytest.param(Device("cpu", seed=1), id="emulated_in_another_order", marks=pytest.mark.slow),
        pytest.param(Device("cuda"), id="gpu", marks=needs_gpu),
    ],
)


def on_devices_in_turn(cases: Sequence[Any]) -> pytest.MarkDecorator:
    """Each case emulated in one of two orders of threads, which its neighbours' kernels share, and on a card."""
    emulated = [
        pytest.param(case, Device("cpu", i % 2), id=f"{case.name}-emulated", marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
    cards = [pytest.param(case, Device("cuda"), id=f"{case.name}-gpu", marks=needs_gpu) for case in cases]
    return pytest.mark.parametrize(("case", "device"), emulated + cards)
