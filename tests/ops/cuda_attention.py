"""Calls of DiffAttention's CUDA kernels by pointers, and what their outputs must be."""

from __future__ import annotations

from typing import Any

import torch

from ..native import cuda
from .cases import AttentionCase
from .cuda_run import TYPES, Device
from .test_diff_attention import assert_near, reference

Tensors = dict[str, torch.Tensor | None]


def shapes_of(case: AttentionCase, x: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Of the node's outputs."""
    query, width = x["query"], 2 if case.wide_value else 1
    assert query is not None
    shapes = {"out": (torch.Size((case.batch, case.steps, case.heads * width * case.d)), query.dtype)}
    for name in filter(None, case.signature().outputs[1:]):
        past = x[name.replace("present", "past")]
        assert past is not None
        shape = list(past.shape)
        if not name.endswith("recent"):
            shape[2] = max(shape[2], case.filled(name))
        shapes[name] = (torch.Size(shape), past.dtype)
    return shapes


def run_cuda(device: Device, case: AttentionCase, x: Tensors, in_place: bool = False) -> dict[str, torch.Tensor]:
    """The outputs; `in_place`: present lies where past does."""
    there = {name: None if tensor is None else device.put(tensor) for name, tensor in x.items()}
    got = {name: device.poisoned(*shape) for name, shape in shapes_of(case, x).items()}
    for name in [*got][1:] if in_place else []:
        past = there[name.replace("present", "past")]
        assert past is not None and past.shape == got[name].shape
        got[name] = past

    reads = {name.replace("past", "present"): x for name, x in there.items() if case.query_only and name[:4] == "past"}

    def slots(name: str) -> int:
        tensor = got[name] if name in got else {**there, **reads}[name]
        assert tensor is not None
        return tensor.shape[2]

    def type_of(name: str) -> int:
        tensor = got[name] if name in got else reads[name]
        assert tensor is not None
        return TYPES.get(tensor.dtype, 0)

    tensors: dict[str, Any] = {
        name: tensor.data_ptr() for name, tensor in {**there, **reads, **got}.items() if tensor is not None
    }
    for name in ("past_length", "present_length"):
        tensors.pop(name, None)
    assert there["cos"] is not None
    op = cuda.DiffAttention(
        **tensors,
        batch=case.batch,
        steps=case.steps,
        past_length=case.past,
        heads=case.heads,
        kv_heads=case.kv_heads,
        d=case.d,
        past_key_capacity=slots("past_key"),
        past_value_capacity=slots("past_value"),
        key_capacity=slots("present_key"),
        value_capacity=slots("present_value"),
        mask_row=case.total,
        positions=there["cos"].shape[0],
        branches=case.branches,
        noise_ratio=case.noise_ratio,
        wide_value=case.wide_value,
        lambda_per_token=case.token_lambda,
        key_bits=case.key_bits,
        value_bits=case.value_bits,
        query_bits=case.query_bits,
        window=case.window,
        first=case.first,
        sliding_window=case.sliding_window,
        type=type_of("out"),
        key_type=type_of("present_key"),
        value_type=type_of("present_value"),
        scale=case.attributes()["scale"],
        norm_eps=case.norm_eps,
    )
    device.run(op)
    return {name: tensor.cpu() for name, tensor in got.items()}


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """One NaN is like the other, and so are zeros."""
    return got.dtype == expected.dtype and torch.equal(got.nan_to_num(1e4), expected.nan_to_num(1e4))


def check(case: AttentionCase, got: dict[str, torch.Tensor], roundings: int = 1) -> None:
    """The cache bit for bit; the output with at most twice the reference's error, both against float64."""
    names = [name for name in case.signature().outputs if name]
    expected = dict(zip(names, reference(case), strict=True))
    assert [*got] == names
    for name in names[1:]:
        assert got[name].shape == expected[name].shape, name
        slots = case.defined(name)
        assert same_bits(got[name][:, :, slots], expected[name][:, :, slots]), f"{name} has other bits"
    assert_near(case, got["out"], roundings)
