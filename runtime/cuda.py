"""The CUDA kernels called through pointers (csrc/cuda/api.h), with neither ONNX Runtime nor torch in between.

    kernels = Kernels(native.library())
    op = Hadamard(a=a.data_ptr(), y=y.data_ptr(), size=a.numel(), block=128, type=FLOAT16)
    kernels.run(op, workspace=memory.data_ptr(), stream=torch.cuda.current_stream().cuda_stream)

Each structure's fields are those of api.h, in its order; what they mean is said there and in ops/. Pointers are
addresses in the device's memory. A call starts its kernels and does not wait for them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ..errors import DiffbitError

FLOAT32, FLOAT16, BFLOAT16 = 1, 10, 16  # types as ONNX numbers them


def _fields(pointers: str, integers: str, floats: str = "") -> list[tuple[str, Any]]:
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Op(ctypes.Structure):
    """One call of an op; `name` is that of its C functions."""

    name: str


class Attention(Op):
    name = "attention"
    _fields_ = _fields(
        "query key value lambda past_key past_value position_ids cos sin attention_mask "
        "past_key_scale past_value_scale past_key_recent past_value_recent out "
        "present_key present_value present_key_scale present_value_scale present_key_recent present_value_recent",
        "batch steps past_length heads kv_heads d past_key_capacity past_value_capacity key_capacity value_capacity "
        "positions branches wide_value lambda_per_token key_bits value_bits query_bits window type key_type value_type",
        "scale norm_eps",
    )


class Hadamard(Op):
    name = "hadamard"
    _fields_ = _fields("a y", "size block type")


class TernaryMatMul(Op):
    name = "ternary_matmul"
    _fields_ = _fields("a packed scale y", "m n k activation_bits type")


class Int4MatMul(Op):
    name = "int4_matmul"
    _fields_ = _fields("a codes scales zeros factor y", "m n k group_size type")


class Kernels:
    """The C functions of a library. Raises DiffbitError where it was built without CUDA."""

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
        """Bytes of the device's memory that `run` needs beside the tensors."""
        function = self._function(f"{op.name}_workspace", ctypes.c_size_t, [ctypes.c_void_p])
        return int(function(ctypes.addressof(op)))

    def run(self, op: Op, workspace: int = 0, stream: int = 0) -> None:
        """Starts the op on a stream (0: the default one); `workspace` is the address of that much memory."""
        function = self._function(op.name, ctypes.c_char_p, [ctypes.c_void_p] * 3)
        wrong = function(ctypes.addressof(op), workspace, stream)
        if wrong is not None:
            raise DiffbitError(f"{type(op).__name__}: {wrong.decode()}")
