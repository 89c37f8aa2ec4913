"""The devices that a model runs on: a row of DEVICES each. Adding a device is adding a row.

ONNX Runtime reaches a device through an execution provider, which its package contains, or a plugin: a package of its
own with a library. runtime/providers.py opens sessions accordingly. It imports nothing heavy, because every command's
--help names the devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Literal

from .io.fields import Rule, read

ELSE = "pip uninstall onnxruntime, then pip install"  # a package that contains another ONNX Runtime


@dataclass(frozen=True)
class Device:
    """name: what a user gives; provider: ONNX Runtime's name of the execution provider that drives it."""

    name: str
    provider: str
    install: str  # how to get the provider
    plugin: str | None = None  # Python module of the package that has it as a plugin
    built_in: bool = True  # whether ONNX Runtime's own, where it contains the provider, will do
    needs: str = "check its driver"  # what to do where the provider finds no device
    options: Mapping[str, str] = field(default_factory=dict)  # of a provider that ONNX Runtime contains
    memory: str = "cpu"  # where a session keeps the cache, as ONNX Runtime names it
    # Nodes that the CPU may run: arithmetic on shapes, positions and masks; all but products; all
    on_cpu: Literal["shapes", "no products", "any"] = "shapes"
    overrides: bool = True  # whether the provider reads an input that has a default value in the file
    # {precision of an artifact: an operator}: with it on the CPU, the provider computes wrong numbers
    wrong: Mapping[str, str] = field(default_factory=dict)
    target: Literal["cpu", "cuda", "webgpu"] = "cpu"  # what a checkpoint is exported for, to run here


def _openvino(name: str, kind: str, needs: str, on_cpu: Literal["shapes", "any"] = "shapes") -> Device:
    return Device(
        name, "OpenVINOExecutionProvider", f"{ELSE} onnxruntime-openvino", needs=needs, on_cpu=on_cpu,
        options={"device_type": kind}, overrides=False, wrong={"fp16": "GroupQueryAttention"},
    )  # fmt: skip


_DEVICES = (
    Device("cpu", "CPUExecutionProvider", "pip install onnxruntime", on_cpu="any"),
    Device(
        "cuda", "CUDAExecutionProvider", f"{ELSE} 'onnxruntime-gpu[cuda,cudnn]'",
        memory="cuda", on_cpu="no products", target="cuda",
    ),
    Device(
        "webgpu", "WebGpuExecutionProvider", "pip install onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu",
        built_in=False,  # onnxruntime-webgpu 1.27 keeps no cache on the device, and its attention errs in more places
        needs="ONNX Runtime lists no GPU (on Linux, those of /sys/class/drm); with the environment variable "
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 it takes what Vulkan offers, also a driver that computes on the CPU",
        memory="webgpu", target="webgpu",
    ),
    _openvino("openvino", "CPU", "install onnxruntime-openvino again", "any"),
    _openvino("openvino:cpu", "CPU", "install onnxruntime-openvino again", "any"),
    _openvino("openvino:gpu", "GPU", "install the driver of Intel's GPU (Debian and Ubuntu: intel-opencl-icd)"),
    _openvino("openvino:npu", "NPU", "install the driver of Intel's NPU (github.com/intel/linux-npu-driver)"),
)  # fmt: skip
DEVICES = {device.name: device for device in _DEVICES}
ANY = "provider:"  # and the name of an execution provider


DeviceName = Annotated[
    str,
    Rule(f"one of {', '.join(DEVICES)}, {ANY}NAME", lambda name: name in DEVICES or re.fullmatch(rf"{ANY}\w+", name)),
]


def device_of(name: str) -> Device:
    """The device that a user names. Raises DiffbitError for another name."""
    read(DeviceName, name, "device")
    if name in DEVICES:
        return DEVICES[name]
    other = name.removeprefix(ANY).removesuffix("ExecutionProvider")
    install = f"install a package of ONNX Runtime that has it, or its plugin onnxruntime-ep-{other.lower()}"
    plugins = f"onnxruntime_ep_{other.lower()}", f"onnxruntime_{other.lower()}"
    plugin = next(filter(find_spec, plugins), plugins[0])
    return Device(name, f"{other}ExecutionProvider", install, plugin, overrides=False)


def dtype_for(device: str) -> str:
    """Return the precision of an artifact for a device: fp16 for a GPU, whose tensor cores multiply 16-bit numbers."""
    return "fp16" if device == "cuda" else "fp32"
