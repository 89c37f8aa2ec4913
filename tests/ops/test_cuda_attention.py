"""DiffAttention's CUDA kernels: the table of cases, emulated in one of two orders of threads and on a card. A cache
with room for the new tokens is written in place in one order and apart in the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from _pytest.mark import ParameterSet

from diffbit.io.errors import DiffbitError

from .cases import ATTENTION_CASES, CUDA_ATTENTION_CASES, RING_CASES, AttentionCase
from .cuda_attention import check, run_cuda, same_bits
from .cuda_run import Device, needs_gpu, on_each_device
from .test_diff_attention import call_reference, in_chunks

# Every third of the windows: what they add here is turning the ring
CASES = [case for case in ATTENTION_CASES if case not in RING_CASES or case.seed % 3 == 0] + CUDA_ATTENTION_CASES


def _emulated(case: AttentionCase, seed: int, name: str = "emulated") -> ParameterSet:
    return pytest.param(case, Device("cpu", seed), id=f"{case.name}-{name}", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *(_emulated(case, index % 2) for index, case in enumerate(CASES) if case.beyond is None),
        *(_emulated(case, 0) for case in CASES if case.beyond is not None),
        *(_emulated(case, 1, "emulated-apart") for case in CASES if case.beyond is not None),
        *(pytest.param(case, Device("cuda"), id=f"{case.name}-gpu", marks=needs_gpu) for case in CASES),
    ],
)
def test_cuda_kernels(case: AttentionCase, device: Device) -> None:
    shared = case.beyond is not None and (device.seed == 1 or device.name == "cuda")
    check(case, run_cuda(device, case, case.inputs(), in_place=shared))
    if shared and device.name == "cuda":
        check(case, run_cuda(device, case, case.inputs()))


HIDDEN = AttentionCase("hidden", batch=2, past=2, d=64)


@on_each_device
@pytest.mark.parametrize(
    "case",
    [
        replace(HIDDEN, steps=1, dtype=torch.bfloat16),
        replace(HIDDEN, steps=20, dtype=torch.bfloat16),
        replace(HIDDEN, steps=3, key_bits=8, value_bits=8),
        replace(HIDDEN, steps=5, key_bits=4, value_bits=16, window=0, past=60),
    ],
    ids=["bf16", "bf16_prefill", "int8", "int4_keys"],
)
def test_a_token_that_sees_nothing_gives_zeros(case: AttentionCase, device: Device) -> None:
    x = case.inputs()
    x["attention_mask"][0] = 0
    out = run_cuda(device, case, x)["out"]
    assert (out[0] == 0).all() and (out[1] != 0).any() and out.isfinite().all()


@dataclass(frozen=True)
class Shifted(Device):
    """Inputs, and what lies where they do, begin at 8 bytes from a multiple of 16."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        there = super().put(torch.cat((torch.zeros(8, dtype=torch.uint8), tensor.flatten().view(torch.uint8))))
        return there[8:].view(tensor.dtype).view(tensor.shape)


@on_each_device
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_caches_that_are_not_aligned(bits: int, steps: int, device: Device) -> None:
    case = AttentionCase("shifted", steps=steps, past=70, beyond=32, d=64, key_bits=bits, value_bits=bits)
    case = replace(case, dtype=torch.float16)
    check(case, run_cuda(Shifted(device.name, device.seed), case, case.inputs(), in_place=True))


@on_each_device
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_nan(odd: float, device: Device) -> None:
    rows = AttentionCase("rows", steps=5, past=3, beyond=1, d=32, key_bits=8, value_bits=8)
    levels = AttentionCase("levels", steps=40, past=60, beyond=0, d=64, key_bits=4, value_bits=2)
    for case, value in ((rows, (4, 19)), (levels, (2, 64 + 40))):
        x = case.inputs()
        x["key"][0, 2, 5] = x["value"][0, *value] = odd
        got = run_cuda(device, case, x)
        names = [name for name in case.signature().outputs if name]
        expected = dict(zip(names, call_reference(case, x), strict=True))
        for name in names:
            slots = case.defined(name)
            assert torch.equal(got[name][:, :, slots].isnan(), expected[name][:, :, slots].isnan()), name
            assert name == "out" or same_bits(got[name][:, :, slots], expected[name][:, :, slots]), name


@on_each_device
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("fp16", steps=40, d=64, dtype=torch.float16),
        AttentionCase("int8", steps=40, d=32, key_bits=8, value_bits=8),
        AttentionCase("int4", steps=75, d=32, key_bits=4, value_bits=4, window=20),
        AttentionCase("int2_query4", steps=75, d=32, key_bits=2, value_bits=4, query_bits=4, window=0),
    ],
    ids=lambda case: case.name,
)
def test_a_prompt_may_be_cut_anywhere(case: AttentionCase, device: Device) -> None:
    def call(part: AttentionCase, x: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
        return [*run_cuda(device, part, x).values()]

    sizes = [7, 1, 9, 2, 1, 11, 9] if case.steps == 40 else [31, 1, 9, 8, 1, 2, 23]
    got = dict(zip(filter(None, case.signature().outputs), in_chunks(case, sizes, call), strict=True))
    check(case, got)


@on_each_device
def test_a_position_beyond_the_tables_is_nan(device: Device) -> None:
    case = AttentionCase("position", steps=2, past=3, batch=2, d=32)
    x = case.inputs()
    x["position_ids"][0] = torch.tensor([-1, 1 << 40])
    out = run_cuda(device, case, x)["out"]
    assert out[0].isnan().all() and out[1].isfinite().all()


@on_each_device
def test_nothing_to_do(device: Device) -> None:
    for case in (AttentionCase("no_steps", steps=0, past=3, beyond=2), AttentionCase("no_batch", batch=0, past=3)):
        got, expected = run_cuda(device, case, case.inputs()), call_reference(case, case.inputs())
        for a, b in zip(got.values(), expected, strict=True):
            assert a.shape == b.shape and same_bits(a, b)


@on_each_device
def test_heads_too_wide_are_refused(device: Device) -> None:
    wide = AttentionCase("wide", d=514, steps=1)
    with pytest.raises(DiffbitError, match="heads are 514 wide, wanted an even number of at most 512"):
        run_cuda(device, wide, wide.inputs())
