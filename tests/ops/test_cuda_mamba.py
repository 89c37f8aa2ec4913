"""CausalConv and SelectiveScan on GPUs: emulated on the CPU, and on a card."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from diffbit.ops import causal_conv

from ..native import cuda
from .cases import MAMBA_CASES, MambaCase
from .cuda_run import TYPES, Device, on_each_device
from .test_mamba import check, ops


@on_each_device
@ops
@pytest.mark.parametrize("in_place", [False, True])
def test_cuda_kernel_is_the_reference(op: ModuleType, in_place: bool, device: Device) -> None:
    cases = [*MAMBA_CASES, MambaCase("bf16", 2, 11, 1, 70, padding=(2,), dtype=torch.bfloat16)]
    for case in [*cases, MambaCase("most_states", steps=2, before=1, channels=3, states=200)]:
        inputs = {
            name: device.put(tensor) for name, tensor in (case.conv if op is causal_conv else case.scan)().items()
        }
        x, past = inputs["x"], inputs["past_state"]
        outputs = {t.name: device.poisoned(x.shape, x.dtype) for t in op.OP.outputs if not (in_place and t.optional)}
        outputs["present_state"] = past if in_place else device.poisoned(past.shape, past.dtype)
        sizes = {"batch": case.batch, "steps": case.steps, "total": case.before + case.steps, "channels": case.channels}
        sizes |= {"width": case.width, "states": case.states, "type": TYPES[case.dtype]}
        names = {name for _, name, _ in op.OP.fields()}
        fields = {name: value for name, value in sizes.items() if name in names}
        fields |= {name.lower(): tensor.data_ptr() for name, tensor in (inputs | outputs).items()}
        device.run((cuda.CausalConv if op is causal_conv else cuda.SelectiveScan)(**fields))
        check({name: tensor.cpu().float().numpy() for name, tensor in outputs.items()}, case, op)
