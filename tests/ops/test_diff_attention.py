"""DiffAttention: the reference against a loop written from the equations, and the body against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from diffbit.ops import diff_attention

from .cases import ATTENTION_CASES, AttentionCase
from .onnx_run import run_node

OUTPUTS = {"out": 3, "present_key": 4, "present_value": 4}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
cases = pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)


def by_the_book(case: AttentionCase) -> np.ndarray:
    """One number at a time, in float64, from arXiv 2410.05258 eq. 1 and the version 2 post: out [B, S, H, width]."""
    x = {name: tensor.double().numpy() for name, tensor in case.inputs().items()}
    d, half, width = case.d, case.d // 2, case.d * (2 if case.wide_value else 1)
    groups = case.kv_heads // (2 if case.wide_value else 1)

    def rotated(vector: np.ndarray, position: int) -> np.ndarray:
        out = np.empty(d)
        for j in range(half):
            c, s = x["cos"][position, j], x["sin"][position, j]
            out[j] = vector[j] * c - vector[j + half] * s
            out[j + half] = vector[j + half] * c + vector[j] * s
        return out

    def cached(name: str, b: int, head: int, t: int) -> np.ndarray:
        if t < case.past:
            return x[f"past_{name}"][b, head, t]
        new = x[name][b, t - case.past, head * d : (head + 1) * d]
        return rotated(new, int(x["position_ids"][b, t - case.past])) if name == "key" else new

    out = np.zeros((case.batch, case.steps, case.heads, width))
    for b, s, pair in np.ndindex(case.batch, case.steps, case.heads):
        group = pair // (case.heads // groups)
        lam = x["lambda"][b, s, pair] if case.token_lambda else x["lambda"][pair]
        seen = [t for t in range(case.past + s + 1) if x["attention_mask"][b, t]]
        for branch, sign in ((0, 1.0), (1, -lam)):
            head = 2 * pair + branch
            q = rotated(x["query"][b, s, head * d : (head + 1) * d], int(x["position_ids"][b, s]))
            key_head = 2 * group + branch if case.wide_value else group
            weights = [math.exp(q @ cached("key", b, key_head, t) / math.sqrt(d)) for t in seen]
            for weight, t in zip(weights, seen, strict=True):
                value_heads = (2 * group, 2 * group + 1) if case.wide_value else (group,)
                v = np.concatenate([cached("value", b, h, t) for h in value_heads])
                out[b, s, pair] += sign * weight / sum(weights) * v
    if case.norm_eps:
        out /= np.sqrt((out**2).mean(-1, keepdims=True) + case.norm_eps)
    return out.reshape(case.batch, case.steps, -1)


def reference(case: AttentionCase, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    x = case.inputs()
    if dtype:
        x = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in x.items()}
    x["lam"] = x.pop("lambda")
    attributes = case.attributes()
    del attributes["spec_version"]
    return diff_attention.reference(**{**x, "past_length": case.past}, **attributes)


@cases
def test_reference_is_the_equation(case: AttentionCase) -> None:
    out, present_key, present_value = reference(case, torch.float64)
    np.testing.assert_allclose(out.numpy(), by_the_book(case), atol=1e-10)
    total = case.past + case.steps
    assert present_key.shape == present_value.shape
    assert present_key.shape[2] == (total if case.beyond is None else total + case.beyond)
    assert not present_key[:, :, :total].isnan().any()
    out_low = reference(case)[0]
    np.testing.assert_allclose(out_low.double().numpy(), out.numpy(), atol=TOLERANCE[case.dtype])


@cases
def test_body_is_the_reference(case: AttentionCase) -> None:
    x = {name: tensor.numpy() for name, tensor in case.inputs().items()}
    got = run_node(diff_attention.function(), x, case.attributes(), OUTPUTS)
    wanted = reference(case)
    assert [a.dtype for a in got] == [np.dtype(str(case.dtype).removeprefix("torch."))] * 3
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == tuple(b.shape)
        np.testing.assert_allclose(a.astype(np.float64), b.double().numpy(), atol=TOLERANCE[case.dtype])


def test_a_token_that_sees_nothing_gives_zeros() -> None:
    case = AttentionCase("hidden", batch=2)
    x = case.inputs()
    x["attention_mask"][0] = 0
    arrays = {name: tensor.numpy() for name, tensor in x.items()}
    out, *_ = run_node(diff_attention.function(), arrays, case.attributes(), OUTPUTS)
    assert (out[0] == 0).all() and (out[1] != 0).any()
    x["lam"] = x.pop("lambda")
    attributes = {k: v for k, v in case.attributes().items() if k != "spec_version"}
    assert (diff_attention.reference(**{**x, "past_length": 0}, **attributes)[0][0] == 0).all()
