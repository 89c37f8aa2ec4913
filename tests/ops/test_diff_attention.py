"""DiffAttention: the reference against a loop written from the equations, the body and every kernel against it.

A cache's numbers are equal bit for bit everywhere. An output may have twice the error of the float32 reference, both
against float64.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper

from diffbit.ops import diff_attention
from diffbit.runtime import native

from .cases import ATTENTION_CASES, AttentionCase
from .onnx_run import on_each_isa, run_node

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
ROUNDING = {torch.float32: 5e-7, torch.float16: 1e-3}  # of an output of size 1
cases = pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)


def by_the_book(case: AttentionCase) -> np.ndarray:
    """One number at a time, in float64, from arXiv 2410.05258 eq. 1 and the version 2 post: out [B, S, H, width]."""
    inputs = case.inputs()
    x = {name: tensor.double().numpy() for name, tensor in inputs.items()}
    d, half, width = case.d, case.d // 2, case.d * (2 if case.wide_value else 1)
    groups = case.kv_heads // (2 if case.wide_value else 1)

    def rotated(vector: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(vector)
        for j in range(half):
            c, s = (x[table][position, j].astype(vector.dtype) for table in ("cos", "sin"))
            out[j] = vector[j] * c - vector[j + half] * s
            out[j + half] = vector[j + half] * c + vector[j] * s
        return out

    def cached(name: str, b: int, head: int, t: int) -> np.ndarray:
        int8 = case.cache == torch.int8
        if t < case.past:
            return x[f"past_{name}"][b, head, t] * (x[f"past_{name}_scale"][b, head, t] if int8 else 1)
        new = x[name][b, t - case.past, head * d : (head + 1) * d]
        row = new.astype(np.float32) if int8 else new
        row = rotated(row, int(x["position_ids"][b, t - case.past])) if name == "key" else row
        if not int8:
            return row
        step = np.abs(row).max() / np.float32(127)
        return np.round(row / (step or np.float32(1))).astype(np.float64) * np.float64(step)

    out = np.zeros((case.batch, case.steps, case.heads, width))
    keys = {
        (b, head, t): (cached("key", b, head, t), cached("value", b, head, t))
        for b, head, t in np.ndindex(case.batch, case.kv_heads, case.past + case.steps)
    }
    for b, s, pair in np.ndindex(case.batch, case.steps, case.heads):
        group = pair // (case.heads // groups)
        lam = x["lambda"][b, s, pair] if case.token_lambda else x["lambda"][pair]
        seen = [t for t in range(case.past + s + 1) if x["attention_mask"][b, t]]
        for branch, sign in ((0, 1.0), (1, -lam)):
            head = 2 * pair + branch
            q = rotated(x["query"][b, s, head * d : (head + 1) * d], int(x["position_ids"][b, s]))
            key_head = 2 * group + branch if case.wide_value else group
            weights = [math.exp(q @ keys[b, key_head, t][0] / math.sqrt(d)) for t in seen]
            for weight, t in zip(weights, seen, strict=True):
                value_heads = (2 * group, 2 * group + 1) if case.wide_value else (group,)
                v = np.concatenate([keys[b, h, t][1] for h in value_heads])
                out[b, s, pair] += sign * weight / sum(weights) * v
    if case.norm_eps:
        out /= np.sqrt((out**2).mean(-1, keepdims=True) + case.norm_eps)
    return out.reshape(case.batch, case.steps, -1)


def call_reference(case: AttentionCase, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    x = dict(x)
    x["lam"] = x.pop("lambda")
    attributes = case.attributes()
    del attributes["spec_version"]
    return diff_attention.reference(**{**x, "past_length": case.past}, **attributes)


def reference(case: AttentionCase) -> tuple[torch.Tensor, ...]:
    return call_reference(case, case.inputs())


def exact(case: AttentionCase, cache_too: bool = False) -> tuple[torch.Tensor, ...]:
    """The reference in float64; `cache_too`: with a float cache in float64 as well."""
    kept = ("past_key_scale", "past_value_scale") if cache_too else ("past_key", "past_value")
    x = {
        name: tensor.double() if tensor.is_floating_point() and not name.startswith(kept) else tensor
        for name, tensor in case.inputs().items()
    }
    return call_reference(case, x)


def function_of(case: AttentionCase) -> Any:
    return diff_attention.function("int8" if case.cache == torch.int8 else "float")


def outputs_of(case: AttentionCase) -> tuple[dict[str, int], dict[str, int]]:
    """The node's outputs (name -> rank), and the element types of those that hold the cache."""
    cache = {torch.float32: 1, torch.float16: 10, torch.int8: 3}[case.cache or case.dtype]
    outputs, kinds = {"out": 3, "present_key": 4, "present_value": 4}, {"present_key": cache, "present_value": cache}
    if case.cache == torch.int8:
        outputs |= {"present_key_scale": 3, "present_value_scale": 3}
        kinds |= {"present_key_scale": 1, "present_value_scale": 1}
    return outputs, kinds


def arrays(x: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in x.items()}


def run(case: AttentionCase, x: dict[str, np.ndarray], isa: str | None = None, threads: int = 1) -> list[np.ndarray]:
    outputs, kinds = outputs_of(case)
    return run_node(function_of(case), x, case.attributes(), outputs, isa=isa, threads=threads, kinds=kinds)


@cases
def test_reference_is_the_equation(case: AttentionCase) -> None:
    out, present_key, present_value = exact(case, cache_too=True)[:3]
    np.testing.assert_allclose(out.numpy(), by_the_book(case), atol=1e-10)
    total = case.past + case.steps
    assert present_key.shape == present_value.shape
    assert present_key.shape[2] == (total if case.beyond is None else total + case.beyond)
    assert not present_key[:, :, :total].isnan().any()
    np.testing.assert_allclose(reference(case)[0].double().numpy(), exact(case)[0].numpy(), atol=TOLERANCE[case.dtype])


@cases
def test_body_is_the_reference(case: AttentionCase) -> None:
    got, wanted = run(case, arrays(case.inputs())), reference(case)
    assert [a.dtype for a in got] == [np.dtype(str(b.dtype).removeprefix("torch.")) for b in wanted]
    np.testing.assert_allclose(got[0].astype(np.float64), wanted[0].double().numpy(), atol=TOLERANCE[case.dtype])
    for a, b in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(a, b.numpy())


@on_each_isa
@cases
def test_kernel_is_the_reference(case: AttentionCase, isa: str) -> None:
    got, wanted = run(case, arrays(case.inputs()), isa), reference(case)
    for a, b in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    oracle = exact(case)[0].numpy()
    size = max(1.0, np.abs(oracle).max())
    error, allowed = (np.abs(a.astype(np.float64) - oracle).max() for a in (got[0], wanted[0].numpy()))
    assert error <= 2 * allowed + ROUNDING[case.dtype] * size


@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_token_that_sees_nothing_gives_zeros(isa: str | None, steps: int) -> None:
    case = AttentionCase("hidden", batch=2, steps=steps, past=2)
    x = case.inputs()
    x["attention_mask"][0] = 0
    out = run(case, arrays(x), isa)[0]
    assert (out[0] == 0).all() and (out[1] != 0).any()
    np.testing.assert_array_equal(call_reference(case, x)[0][0], 0)


@on_each_isa
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_int8_row_with_no_finite_step_is_nan(odd: float, isa: str) -> None:
    case = AttentionCase("odd", steps=5, past=3, beyond=1, d=20, cache=torch.int8)
    x = case.inputs()
    x["key"][0, 3, 2] = x["value"][0, 4, 19] = odd
    got, wanted = run(case, arrays(x), isa), call_reference(case, x)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(a), b.isnan().numpy())
    for a, b in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    rows = slice(case.past, case.past + case.steps)
    assert [int(np.isnan(scales[:, :, rows]).sum()) for scales in got[3:]] == [1, 1]


def node_session(
    case: AttentionCase, threads: int = 1, isa: str | None = None, without: str = "", **changed: Any
) -> onnxruntime.InferenceSession:
    """A session on a node whose inputs and outputs have open shapes.

    `without` leaves an input out; `changed` replaces attributes (None: left out).
    """
    outputs, kinds = outputs_of(case)
    x = arrays(case.inputs())
    element = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in x.items()}
    attributes = {k: v for k, v in {**case.attributes(), **changed}.items() if v is not None}
    names = ["" if name == without else name for name in x]
    node = helper.make_node("DiffAttention", names, list(outputs), domain="diffbit", **attributes)
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in element.items() if name != without],
        [helper.make_tensor_value_info(name, kinds.get(name, element["query"]), None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("diffbit", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(native.library()))
    with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


IN_PLACE = [case for case in ATTENTION_CASES if case.beyond is not None]


@on_each_isa
@pytest.mark.parametrize("case", IN_PLACE, ids=lambda case: case.name)
def test_a_shared_buffer_gains_the_new_rows_and_nothing_else(case: AttentionCase, isa: str) -> None:
    wanted = run(case, arrays(case.inputs()), isa)
    session, x, outputs = node_session(case, isa=isa), arrays(case.inputs()), list(outputs_of(case)[0])
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in x.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out")
    for name in outputs[1:]:
        binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), wanted[0])
    total = case.past + case.steps
    for name, copied in zip(outputs[1:], wanted[1:], strict=True):
        shared, before = values[name.replace("present", "past")].numpy(), x[name.replace("present", "past")]
        np.testing.assert_array_equal(shared[:, :, :total], copied[:, :, :total])
        np.testing.assert_array_equal(shared[:, :, total:], before[:, :, total:])


@on_each_isa
@pytest.mark.parametrize("case", ATTENTION_CASES[::3], ids=lambda case: case.name)
def test_threads_and_neighbours_change_no_bit(case: AttentionCase, isa: str) -> None:
    x = arrays(case.inputs())
    wanted = run(case, x, isa)
    sessions = [node_session(case, threads, isa) for threads in (2, 4)]
    found: list[list[np.ndarray]] = []

    def several(session: onnxruntime.InferenceSession) -> None:
        found.extend(session.run(None, x) for _ in range(5))

    workers = [threading.Thread(target=several, args=(session,)) for session in sessions for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 20
    for got in found:
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_bad_attributes_are_sentences() -> None:
    case = AttentionCase("bad")
    for changed, sentence in [
        ({"num_heads": None}, "DiffAttention has no integer attribute num_heads"),
        ({"num_heads": 0}, "attribute num_heads is 0, wanted 1 to"),
        (
            {"num_kv_heads": 3},
            "num_heads is 2, wanted a multiple of the 1 kv heads of num_kv_heads 3, which must be even",
        ),
        ({"num_heads": 3, "num_kv_heads": 4}, "num_heads is 3, wanted a multiple of the 2 kv heads of num_kv_heads 4"),
        ({"wide_value": 2}, "attribute wide_value is 2, wanted 0 to 1"),
        ({"scale": None}, "has no float attribute scale"),
        ({"norm_eps": None}, "has no float attribute norm_eps"),
        ({"spec_version": 2}, "spec_version is 2, this library computes 1"),
    ]:
        with pytest.raises(Exception, match=sentence):
            node_session(case, **changed)


def test_bad_inputs_are_sentences() -> None:
    case = AttentionCase("bad", past=4, beyond=2, batch=2)
    int8 = replace(case, cache=torch.int8)
    x = arrays(case.inputs())
    positions = x["position_ids"]
    for changed, sentence in [
        ({"query": x["query"][0]}, r"query is \[5, 32\], wanted \[any, any, any\]"),
        ({"query": x["query"][:, :, :-8]}, r"query is \[2, 5, 24\], wanted \[2, 5, 32\]"),
        ({"key": x["key"][:, :4]}, r"key is \[2, 4, 16\], wanted \[2, 5, any\]"),
        ({"key": x["key"][:, :, :6]}, r"key is \[2, 5, 6\], wanted 2 sub-heads of an even number"),
        ({"value": x["value"][:, :, :8]}, r"value is \[2, 5, 8\], wanted \[2, 5, 16\]"),
        ({"lambda": x["lambda"][:1]}, r"lambda is \[1\], wanted \[2\]"),
        ({"lambda": np.zeros((2, 5, 1), np.float32)}, r"lambda is \[2, 5, 1\], wanted \[2, 5, 2\]"),
        ({"past_key": x["past_key"][:, :1]}, r"past_key is \[2, 1, 11, 8\], wanted \[2, 2, any, 8\]"),
        ({"past_value": x["past_value"][:, :, 1:]}, r"past_value is \[2, 2, 10, 8\], wanted \[2, 2, 11, 8\]"),
        ({"past_length": np.array([-1])}, "past_length is -1, wanted 0 to 11, the capacity of past_key"),
        ({"past_length": np.array([12])}, "past_length is 12, wanted 0 to 11, the capacity of past_key"),
        ({"past_length": np.array([3, 4])}, r"past_length is \[2\], wanted \[1\]"),
        ({"past_length": np.array([5])}, r"attention_mask is \[2, 9\], wanted \[2, 10\]"),
        ({"position_ids": positions + 100}, r"position_ids holds 10\d, wanted 0 to 11: cos has 12 rows"),
        ({"position_ids": positions - 100}, r"position_ids holds -9\d, wanted 0 to 11: cos has 12 rows"),
        ({"position_ids": positions[:, :4]}, r"position_ids is \[2, 4\], wanted \[2, 5\]"),
        ({"cos": x["cos"][:, :3]}, r"cos is \[12, 3\], wanted \[any, 4\]"),
        ({"sin": x["sin"][:3]}, r"sin is \[3, 4\], wanted \[12, 4\]"),
        ({"attention_mask": x["attention_mask"][:1]}, r"attention_mask is \[1, 9\], wanted \[2, 9\]"),
    ]:
        with pytest.raises(Exception, match=sentence):
            node_session(case).run(None, {**x, **changed})
    quantized = arrays(int8.inputs())
    with pytest.raises(Exception, match=r"past_key_scale is \[2, 2, 10\], wanted \[2, 2, 11\]"):
        node_session(int8).run(None, {**quantized, "past_key_scale": quantized["past_key_scale"][:, :, 1:]})


def test_an_output_buffer_too_small_is_an_error() -> None:
    case = AttentionCase("small", past=4)
    session, x = node_session(case), arrays(case.inputs())
    binding = session.io_binding()
    for name, array in x.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("out")
    binding.bind_output("present_value")
    small = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 2, 6, 8), np.float32))
    binding.bind_ortvalue_output("present_key", small)
    with pytest.raises(Exception, match=r"present_key|shape"):
        session.run_with_iobinding(binding)


@pytest.mark.parametrize("dropped", ["past_key_scale", "past_value_scale"])
def test_an_int8_cache_without_scales_is_an_error(dropped: str) -> None:
    case = AttentionCase("scales", cache=torch.int8, past=2)
    x = arrays(case.inputs())
    del x[dropped]
    with pytest.raises(Exception, match=f"{dropped} is missing, wanted exactly where the cache is int8"):
        node_session(case, without=dropped).run(None, x)
