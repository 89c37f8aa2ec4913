"""Calls the CUDA kernels (csrc/cuda/api.h) on raw pointers, without ONNX Runtime or torch in between.

    kernels = Kernels(native.library())
    op = Hadamard(a=a.data_ptr(), y=y.data_ptr(), size=a.numel(), block=128, type=FLOAT16)
    kernels.run(op, workspace=memory.data_ptr(), stream=torch.cuda.current_stream().cuda_stream)

The structures come from ops/schema.py, as in api.h; api.h and ops/ describe the fields. Pointers are addresses in
device memory. A call launches its kernels and does not wait for them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from diffbit.io.errors import DiffbitError
from diffbit.ops import schema
from diffbit.ops.signature import Op as Signature
from diffbit.ops.signature import Type

FLOAT32, FLOAT16, BFLOAT16 = (int(type) for type in (Type.FLOAT32, Type.FLOAT16, Type.BFLOAT16))

_CTYPES = {"const void*": ctypes.c_void_p, "void*": ctypes.c_void_p, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Op(ctypes.Structure):
    """One call of an op."""

    signature: Signature


def _structure(op: Signature) -> type[Op]:
    fields = [(name, _CTYPES[type_]) for type_, name, _ in op.fields()]
    return type(op.name, (Op,), {"signature": op, "_fields_": fields})


STRUCTURES = {op.name: _structure(op) for op in schema.OPS}


def __getattr__(name: str) -> type[Op]:
    """Return an op's structure: `Hadamard`."""
    if name in STRUCTURES:
        return STRUCTURES[name]
    raise AttributeError(f"there is no op {name}")


class Kernels:
    """The C functions of a library. Both methods raise DiffbitError if it was built without CUDA."""

    def __init__(self, library: Path) -> None:
        self._path = library
        self._library = ctypes.CDLL(str(library))

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        try:
            function = getattr(self._library, f"diffbit_cuda_{name}")
        except AttributeError:
            raise DiffbitError(f"{self._path}: has no diffbit_cuda_{name}; it was built without CUDA") from None
        function.restype, function.argtypes = result, arguments
        return function

    def workspace(self, op: Op) -> int:
        """Bytes of device memory that `run` needs in addition to the tensors."""
        function = self._function(f"{op.signature.call.function}_workspace", ctypes.c_size_t, [ctypes.c_void_p])
        return int(function(ctypes.addressof(op)))

    def run(self, op: Op, workspace: int = 0, stream: int = 0) -> None:
        """Launch the op on a stream (0: the default stream). workspace: address of `self.workspace(op)` bytes."""
        function = self._function(op.signature.call.function, ctypes.c_char_p, [ctypes.c_void_p] * 3)
        wrong = function(ctypes.addressof(op), workspace, stream)
        if wrong is not None:
            raise DiffbitError(f"{type(op).__name__}: {wrong.decode()}")
