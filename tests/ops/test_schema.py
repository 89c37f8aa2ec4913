"""ops/schema.py is the only place of a signature: what is made from it is what stands in the tree."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from diffbit.io.errors import DiffbitError
from diffbit.ops import diff_attention, diff_attention_body, hadamard, int4_matmul, schema, ternary_matmul
from diffbit.ops.signature import DOMAIN, Type

from ..native import cuda


def test_the_headers_are_up_to_date() -> None:
    for path, text in schema.headers().items():
        assert path.read_text() == text, "run python -m diffbit.ops.schema"


def test_ctypes_structures_match_the_headers() -> None:
    header = next(text for path, text in schema.headers().items() if path.name == "calls.h")
    for op in cuda.STRUCTURES.values():
        for field, _ in op._fields_:
            offset = getattr(op, field).offset
            assert f"static_assert(offsetof(Diffbit{op.__name__}, {field}) == {offset}," in header
        assert f"static_assert(sizeof(Diffbit{op.__name__}) == {ctypes.sizeof(op)}," in header


@pytest.mark.parametrize("op", [diff_attention, hadamard, int4_matmul, ternary_matmul], ids=lambda op: op.OP.name)
def test_bodies_have_the_signature_of_their_op(op) -> None:
    function = diff_attention_body.function() if op is diff_attention else op.function()
    assert (function.domain, function.name) == (DOMAIN, op.OP.name)
    used = len(diff_attention.Signature().inputs) if op is diff_attention else len(op.OP.inputs)
    assert [value.name for value in function.inputs] == [tensor.name for tensor in op.OP.inputs[:used]]
    assert {*function.attributes} == {attribute.name for attribute in op.OP.attributes} | {"spec_version"}
    assert function.opset_imports == dict(op.OP.opsets)


def test_types_are_those_of_every_combination() -> None:
    rows = schema.DIFF_ATTENTION.types()
    assert len(rows) == 2 * 4 * 4 and len({tuple(row) for row in rows}) == len(rows)
    tensors = [tensor.name for tensor in schema.DIFF_ATTENTION.inputs + schema.DIFF_ATTENTION.outputs]
    for row in rows:
        types = dict(zip(tensors, row, strict=True))
        assert types["query"] == types["key"] == types["value"] == types["out"]
        for side in ("key", "value"):
            assert types[f"past_{side}_scale"] == Type.FLOAT16
            assert types[f"present_{side}"] == types[f"past_{side}"]
    assert [tuple(row) for row in schema.HADAMARD.types()] == [(1, 1), (10, 10)]


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"K": 8}, "TernaryMatMul: attribute N is missing"),
        ({"K": 8, "N": 8, "bits": 2}, "TernaryMatMul has no attribute bits, wanted K, N or activation_bits"),
        ({"K": 0, "N": 8}, "TernaryMatMul: K is 0, wanted 1 to 16777216"),
        ({"K": 8.0, "N": 8}, "TernaryMatMul: K is 8.0, wanted 1 to 16777216"),
        ({"K": 8, "N": 8, "activation_bits": 5}, "TernaryMatMul: activation_bits is 5, wanted 8 or 4"),
    ],
)
def test_attributes_are_checked(attributes: dict[str, int], sentence: str) -> None:
    with pytest.raises(DiffbitError, match=sentence):
        schema.TERNARY_MATMUL.attributes_of(attributes)
    complete = schema.TERNARY_MATMUL.attributes_of({"K": 8, "N": 9})
    assert complete == {"K": 8, "N": 9, "activation_bits": 8, "spec_version": 2}


def test_it_needs_neither_torch_nor_onnx() -> None:
    code = "import sys, diffbit.ops.schema; assert not {'torch', 'onnx', 'onnx_ir'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
