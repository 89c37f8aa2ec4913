"""The library's part for NVIDIA GPUs, as far as it can be seen without one: what it exports, needs and holds."""

from __future__ import annotations

import ctypes
import re

import pytest

from diffbit.runtime import cuda

from .host import ROOT

API = (ROOT / "csrc" / "cuda" / "api.h").read_text()
KINDS = {"void*": ctypes.c_void_p, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


@pytest.mark.parametrize("op", cuda.Op.__subclasses__(), ids=lambda op: op.name)
def test_structures_are_those_of_the_header(op: type[cuda.Op]) -> None:
    (body,) = re.findall(rf"struct Diffbit{op.__name__} \{{(.*?)\n\}};", API, re.DOTALL)
    fields = []
    for kind, names in re.findall(r"(?:const )?(void\*|int64_t|float) ([\w, ]+);", body):
        fields += [(name, KINDS[kind]) for name in names.split(", ")]
    assert fields == op._fields_


def test_every_op_of_the_header_has_a_structure() -> None:
    found = set(re.findall(r"DIFFBIT_CUDA_API const char\* diffbit_cuda_(\w+)\(const Diffbit(\w+)\*", API))
    assert found == {(op.name, op.__name__) for op in cuda.Op.__subclasses__()}
