"""GatherQuantized: the reference is the dequantized table; body and kernel are the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffbit.ops import gather_quantized

from ..native import cuda
from .cases import TABLE_CASES as CASES
from .cases import Int4Case
from .cuda_run import TYPES, Device, on_devices_in_turn
from .onnx_run import body_of, on_each_isa, on_isas_in_turn, run_node

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
CONSTANTS = ("codes", "scales", "zeros", "factor")


def node(case: Int4Case) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
    ids = torch.randint(0, case.n, case.lead, generator=torch.Generator().manual_seed(case.seed))
    ids[0, 0], ids[-1, -1] = 0, case.n - 1
    tensors = {"ids": ids, **case.packed()._asdict(), "factor": torch.tensor([case.factor], dtype=case.dtype)}
    return {name: tensor.numpy() for name, tensor in tensors.items()}, case.attributes() | {"bits": case.bits}


def expected(case: Int4Case, inputs: dict[str, np.ndarray]) -> np.ndarray:
    ids, factor = (torch.from_numpy(inputs[name]) for name in ("ids", "factor"))
    return gather_quantized.reference(ids, case.packed(), factor, case.n, case.k).numpy()


@cases
def test_reference_is_the_dequantized_table(case: Int4Case) -> None:
    inputs, _ = node(case)
    _, codes, scale, zero, _ = case.inputs()
    group = case.k if case.row_scale else case.group
    wide = [
        np.repeat(x, group, 1)[:, : case.k]
        for x in (scale.numpy(), zero.numpy() if zero is not None else np.full(scale.shape, 2 ** (case.bits - 1)))
    ]
    table = (codes.numpy().astype(np.float32) - wide[1].astype(np.float32)) * wide[0] * np.float32(inputs["factor"])
    assert np.array_equal(expected(case, inputs), table.astype(inputs["factor"].dtype)[inputs["ids"]])


@cases
def test_body_is_exact(case: Int4Case) -> None:
    inputs, attributes = node(case)
    kind = {"Y": 1 if case.dtype == torch.float32 else 10}
    (got,) = run_node(
        body_of(gather_quantized.function, case.bits), inputs, attributes, {"Y": 3}, CONSTANTS, kinds=kind
    )
    assert np.array_equal(got, expected(case, inputs))


@on_isas_in_turn(CASES)
def test_kernel_is_exact(case: Int4Case, isa: str) -> None:
    inputs, attributes = node(case)
    kind = {"Y": 1 if case.dtype == torch.float32 else 10}
    (got,) = run_node(
        body_of(gather_quantized.function, case.bits), inputs, attributes, {"Y": 3}, CONSTANTS, isa, kinds=kind
    )
    assert np.array_equal(got, expected(case, inputs))


@on_devices_in_turn(CASES)
def test_cuda_kernel_is_exact(case: Int4Case, device: Device) -> None:
    inputs, _ = node(case)
    ids, *tables = (device.put(torch.from_numpy(x)) for x in inputs.values())
    y = device.poisoned((*case.lead, case.k), case.dtype)
    pointers = [x.data_ptr() for x in (ids, *tables, y)]
    if case.symmetric:
        pointers[3] = 0
    scales = tables[1].shape[1]
    sizes = [ids.numel(), case.n, case.k, case.group, scales, case.bits]
    device.run(cuda.GatherQuantized(*pointers, *sizes, TYPES[case.dtype]))
    assert np.array_equal(y.cpu().numpy(), expected(case, inputs))


@on_each_isa
@pytest.mark.parametrize("outside", [-1, 40])
def test_ids_outside_the_table_are_refused(isa: str, outside: int) -> None:
    case = CASES[0]
    inputs, attributes = node(case)
    inputs["ids"][1, 1] = outside
    with pytest.raises(Exception, match=f"ids holds {outside}, wanted 0 to 39"):
        run_node(
            body_of(gather_quantized.function, case.bits), inputs, attributes, {"Y": 3}, CONSTANTS, isa, kinds={"Y": 1}
        )
