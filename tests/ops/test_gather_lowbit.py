"""GatherLowBit: the reference is the dequantized table; body and kernel are the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffbit.ops import gather_lowbit

from ..native import cuda
from .cases import LOWBIT_TABLE_CASES as CASES
from .cases import LowBitCase
from .cuda_run import TYPES, Device, on_devices_in_turn
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node
from .test_lowbit_matmul import CONSTANTS, weights

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def node(case: LowBitCase) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
    ids = torch.randint(0, case.n, case.lead, generator=torch.Generator().manual_seed(case.seed))
    ids[0, 0], ids[-1, -1] = 0, case.n - 1
    tensors = {"ids": ids, **case.packed()._asdict(), "factor": torch.tensor([case.factor], dtype=case.dtype)}
    return {name: tensor.numpy() for name, tensor in tensors.items()}, case.attributes()


def expected(case: LowBitCase, inputs: dict[str, np.ndarray]) -> np.ndarray:
    ids, factor = (torch.from_numpy(inputs[name]) for name in ("ids", "factor"))
    return gather_lowbit.reference(ids, case.packed(), factor, case.n, case.k).numpy()


def run(case: LowBitCase, inputs: dict[str, np.ndarray], isa: str | None = None) -> np.ndarray:
    body, kind = (
        body_of(gather_lowbit.function, case.bits, case.table, case.trellis),
        {"Y": 1 if case.dtype == torch.float32 else 10},
    )
    (got,) = run_node(body, inputs, case.attributes(), {"Y": 3}, CONSTANTS, isa, kinds=kind)
    return got


@cases
def test_reference_is_the_dequantized_table(case: LowBitCase) -> None:
    inputs, _ = node(case)
    v, scale, row_scale = weights(case)
    wide = np.repeat(scale, case.group, 1)[:, : case.k]
    factor = inputs["factor"].astype(np.float32)
    table = v.astype(np.float32) * wide * (row_scale[:, None] * factor)
    assert np.array_equal(expected(case, inputs), table.astype(inputs["factor"].dtype)[inputs["ids"]])


@cases
def test_body_is_exact(case: LowBitCase) -> None:
    inputs, _ = node(case)
    assert np.array_equal(run(case, inputs), expected(case, inputs))


@on_isas_in_turn(CASES)
def test_kernel_is_exact(case: LowBitCase, isa: str) -> None:
    inputs, _ = node(case)
    assert np.array_equal(run(case, inputs, isa), expected(case, inputs))


@on_devices_in_turn(CASES)
def test_cuda_kernel_is_exact(case: LowBitCase, device: Device) -> None:
    inputs, _ = node(case)
    tensors = [device.put(torch.from_numpy(x)) for x in inputs.values()]
    y = device.poisoned((*case.lead, case.k), case.dtype)
    pointers = [x.data_ptr() for x in (*tensors, y)]
    if not case.int8_scales:
        pointers[3] = 0
    if not case.table:
        pointers[4] = 0
    sizes = [tensors[0].numel(), case.n, case.k, case.group, case.bits, 3 if case.int8_scales else cuda.FLOAT16]
    sizes.append(int(case.trellis))
    device.run(cuda.GatherLowBit(*pointers, *sizes, TYPES[case.dtype]))
    assert np.array_equal(y.cpu().numpy(), expected(case, inputs))


@on_each_isa
@pytest.mark.parametrize("outside", [-1, 40])
def test_ids_outside_the_table_are_refused(isa: str, outside: int) -> None:
    inputs, _ = node(CASES[0])
    inputs["ids"][1, 1] = outside
    with pytest.raises(Exception, match=f"ids holds {outside}, wanted 0 to 39"):
        run(CASES[0], inputs, isa)
