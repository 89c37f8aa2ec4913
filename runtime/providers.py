"""Imports ONNX Runtime when the first session is opened, and opens sessions that run on the requested device.

The CPU and the GPU wheel of ONNX Runtime overwrite each other's files, so neither is a base dependency. ONNX Runtime
falls back to the CPU with a warning when a device is not available, or has no kernel for a node; `open_session` fails
instead. devices.py has the table of devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Protocol

from numpy.typing import NDArray

from ..devices import Device, device_of
from ..io.errors import DiffbitError
from ..io.resources import default_threads
from ..ops.schema import OPS
from .driver import Driver, runs, version_text
from .external import external_locations, with_inputs
from .native import cuda_architectures

CPU = "CPUExecutionProvider"
DRIVERS = {12: 525, 13: 580}  # CUDA version -> the oldest driver that runs it
FIRST_FOR_CUDA_13 = "1.27"  # of onnxruntime-gpu's wheels on PyPI; older ones are for CUDA 12

# The operators that dominate a model's run time. `session.disable_cpu_ep_fallback` would be stricter, but ONNX Runtime
# places arithmetic on shapes (Shape, Gather, Concat, ...) on the CPU, so with that option it refuses every graph.
COMPUTE = {
    *("MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
    *("MatMulNBits", "MatMulBnb4", "Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"),
    *(op.named(index) for op in OPS for index in range(op.names)),
}
# The operators that compute shapes, positions and masks from integers, a few bytes a token. Every low-bit
# weight or cache also has nodes of another kind (Round, BitShift, MatMulInteger), so it is not mistaken for these.
SHAPES = {
    *("Shape", "Size", "Gather", "Concat", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Range", "Cast", "Expand"),
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Where", "And", "Or", "Not", "Equal", "Less", "LessOrEqual"),
    *("Greater", "GreaterOrEqual", "ConstantOfShape", "ReduceSum", "ReduceMax", "CumSum"),
}


class NodeArg(Protocol):
    """onnxruntime.NodeArg: an input or output of a graph."""

    name: str
    type: str  # such as "tensor(float)"
    shape: list[int | str]


class OrtValue(Protocol):
    """onnxruntime.OrtValue: a tensor in the memory of a device."""

    def data_ptr(self) -> int: ...


class Binding(Protocol):
    """onnxruntime.IOBinding: the tensors that a session's next run reads and writes."""

    def bind_cpu_input(self, name: str, array: NDArray[Any]) -> None: ...
    def bind_input(self, name: str, device: str, *id_dtype_shape_address: object) -> None: ...
    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None: ...
    def bind_ortvalue_output(self, name: str, value: OrtValue) -> None: ...
    def bind_output(self, name: str, device: str, *id_dtype_shape_address: object) -> None: ...
    def get_outputs(self) -> list[OrtValue]: ...


class OrtSession(Protocol):
    """onnxruntime.InferenceSession."""

    def get_inputs(self) -> list[NodeArg]: ...
    def get_overridable_initializers(self) -> list[NodeArg]: ...
    def get_outputs(self) -> list[NodeArg]: ...
    def get_providers(self) -> list[str]: ...
    def io_binding(self) -> Binding: ...
    def run_with_iobinding(self, binding: Binding) -> None: ...


def onnxruntime() -> ModuleType:
    """Return the onnxruntime module, with telemetry off. Raises DiffbitError with install instructions if it is
    missing."""
    # Telemetry writes files to the user's cache and calls Microsoft's servers. A value that the user has set is kept
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    install = "pip install onnxruntime, or 'onnxruntime-gpu[cuda,cudnn]' for an NVIDIA GPU"
    try:
        import onnxruntime as ort
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise DiffbitError(f"running a model needs ONNX Runtime, which is not installed: {install}") from None
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "onnxruntime":
            raise
        raise DiffbitError(f"ONNX Runtime is installed but cannot be loaded ({error}): {install}") from None
    if not hasattr(ort, "InferenceSession"):  # what removing one of two overlapping wheels leaves behind
        raise DiffbitError(f"ONNX Runtime is installed but incomplete: pip uninstall onnxruntime, then {install}")
    return ort


def open_session(
    model: Path,
    device: str,
    threads: int | None,
    library: Path | None = None,
    bfloat16: bool = False,
    inputs: Sequence[str] = (),
) -> OrtSession:
    """Return an `onnxruntime.InferenceSession` for the file `model` that runs on `device` (devices.py has their names).

    `threads` is the size of the intra-op pool; None: one per physical core that the process may use. `library` holds
    kernels for diffbit's operators (native.py); without it their bodies run. `bfloat16` is as in SessionOptions.
    `inputs`: the initializers that become optional inputs. Raises DiffbitError if the device, its driver or its memory
    does not suffice, or if ONNX Runtime would compute on the CPU instead.
    """
    row = device_of(device)
    ort = onnxruntime()
    options = _options(ort, threads, library, bfloat16)
    if row.provider != CPU:
        ort.set_default_logger_severity(4)  # for the provider's messages outside a session
    providers = _providers(ort, row, options)
    if row.name == "cuda":
        # preload_dlls finds CUDA libraries installed as wheels. It prints the missing ones; a library must not print
        if hasattr(ort, "preload_dlls"):
            with contextlib.redirect_stdout(io.StringIO()):
                ort.preload_dlls()
        _check_card(ort, library)
    try:
        source: str | bytes = str(model)
        with _folder_of_weights(model) if inputs else contextlib.nullcontext() as folder:
            if inputs:
                source = with_inputs(model.read_bytes(), inputs)
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
            session: OrtSession = ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions have no base of their own
        if out_of_memory(error):
            raise DiffbitError(f"{model}: does not fit into the memory of device {device}") from None
        if why := _why_not(ort, row, str(error)):
            raise DiffbitError(_cannot_start(ort, row, why)) from None
        raise DiffbitError(f"{model}: ONNX Runtime {ort.__version__} cannot load it ({_first_line(error)})") from None
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # returns memory used for loading to the system; glibc would keep several bytes per ternary weight
    if row.provider not in (active := session.get_providers()):
        why = why_no_cuda(ort) or f"it offers {', '.join(active)}" if row.name == "cuda" else row.needs
        raise DiffbitError(_cannot_start(ort, row, why))
    if stray := _on_cpu(row, node_counts(session)):
        raise DiffbitError(
            f"{model}: device {device} was requested, but ONNX Runtime {ort.__version__} would run these of its "
            f"operators on the CPU: {', '.join(stray)}; run with device cpu, or export with --target {row.target} "
            "or other formats"
        )
    return session


@contextlib.contextmanager
def _folder_of_weights(model: Path) -> Iterator[Path]:
    """Yield the folder in which ONNX Runtime finds the weights of a model that it gets as bytes: the model's, or, where
    they are links out of it, as in the hub's cache, which ONNX Runtime refuses, one with the files themselves. It is
    needed until the session is open."""
    files = [model.parent / name for name in sorted(external_locations(model))]
    if not any(file.is_symlink() for file in files):
        yield model.parent
        return
    place = files[0].resolve().parent  # on the same disk, so that a second name costs nothing
    with tempfile.TemporaryDirectory(prefix="diffbit-", dir=place if os.access(place, os.W_OK) else None) as folder:
        for file in files:
            try:
                os.link(file.resolve(), Path(folder, file.name))
            except OSError:  # another disk, or one without such names
                shutil.copyfile(file, Path(folder, file.name))
        yield Path(folder)


def _options(ort: ModuleType, threads: int | None, library: Path | None, bfloat16: bool) -> Any:
    """Return onnxruntime.SessionOptions without a provider."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions; warnings are for ONNX Runtime's developers
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # it keeps a plan for each prompt length: 12 MB more, and no faster
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", "20")  # longer: slow beside other programs
    options.intra_op_num_threads = threads or default_threads() or 0
    if library is not None:
        options.add_session_config_entry("diffbit.bfloat16", str(int(bfloat16)))
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # ONNX Runtime's exceptions have no base of their own
            raise DiffbitError(
                f"{library}: ONNX Runtime {ort.__version__} cannot use diffbit's native library "
                f"({_first_line(error)}); install diffbit again, or run without it (--no-native)"
            ) from None
    return options


def _providers(ort: ModuleType, device: Device, options: Any) -> list[Any] | None:
    """Return what to pass as `providers` for a device; None: a plugin has been added to the options instead."""
    if device.provider == CPU:
        return [CPU]
    if device.plugin is not None and find_spec(device.plugin) is not None:
        options.add_provider_for_devices([_plugin_device(ort, device)], {})
        return None
    available = ort.get_available_providers()
    if device.built_in and device.provider in available:
        return [(device.provider, dict(device.options)), CPU]
    plugin = "" if device.built_in else " as a plugin"
    raise DiffbitError(
        f"device {device.name} needs ONNX Runtime's {device.provider}{plugin}; the installed wheel has "
        f"{', '.join(available)}: {device.install}"
    )


def _plugin_devices(ort: ModuleType, provider: str) -> list[Any]:
    """Return the devices (onnxruntime.OrtEpDevice) of a provider whose plugin has been registered."""
    devices: list[Any] = getattr(ort, "get_ep_devices", list)()
    return [device for device in devices if device.ep_name == provider and "library_path" in device.ep_metadata]


def _plugin_device(ort: ModuleType, device: Device) -> Any:
    """Return the plugin's device. Raises DiffbitError if it has none here."""
    if not _plugin_devices(ort, device.provider):
        _register(device.provider, str(device.plugin))
    for entry in _plugin_devices(ort, device.provider):
        return entry
    raise DiffbitError(_cannot_start(ort, device, device.needs))


@functools.cache  # a second registration would end in a crash
def _register(provider: str, plugin: str) -> None:
    """Register a plugin's library. Some plugins name their provider after the registration."""
    try:
        onnxruntime().register_execution_provider_library(provider, resolve_name(f"{plugin}:get_library_path")())
    except Exception as error:  # ONNX Runtime's exceptions have no base of their own
        package = plugin.replace("_", "-")
        raise DiffbitError(
            f"ONNX Runtime {onnxruntime().__version__} cannot use the plugin {package} ({_first_line(error)}); "
            f"pip install --upgrade onnxruntime {package}"
        ) from None


def computes_on_cpu(device: str) -> bool:
    """Whether a session on this GPU runs on a driver that computes on the CPU, such as SwiftShader."""
    row, ort = device_of(device), onnxruntime()
    kinds = {entry.device.type for entry in _plugin_devices(ort, row.provider)} if row.memory != "cpu" else set()
    return bool(kinds) and kinds == {ort.OrtHardwareDeviceType.CPU}


def node_counts(session: OrtSession) -> dict[str, dict[str, int]]:
    """Return {provider: {operator: nodes}}: what ONNX Runtime placed where; empty if it (< 1.24) does not report it."""
    counts: dict[str, Counter[str]] = {}
    for part in getattr(session, "get_provider_graph_assignment_info", list)():
        counts.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return {provider: dict(count.most_common()) for provider, count in counts.items()}


def placement(nodes: dict[str, dict[str, int]]) -> str:
    """Describe node counts: the nodes of each provider, and the operators on the CPU beside another one."""
    texts = []
    for provider, counts in nodes.items():
        operators = ", ".join(f"{operator} {count}" for operator, count in counts.items())
        shown = f" ({operators})" if provider == CPU and len(nodes) > 1 else ""
        texts.append(f"{provider} {sum(counts.values())}{shown}")
    return "; ".join(texts)


def _on_cpu(device: Device, nodes: dict[str, dict[str, int]]) -> list[str]:
    """Return the operators on the CPU that should run on the device."""
    operators = nodes.get(CPU, {}).keys()
    stray = {"any": set[str](), "no products": operators & COMPUTE, "shapes": operators - SHAPES}[device.on_cpu]
    return sorted(stray)


def _check_card(ort: ModuleType, library: Path | None) -> None:
    """Raise DiffbitError if the driver is too old for ONNX Runtime, or the library has no kernels for the GPU."""
    try:
        driver = Driver()
        card = driver.architecture
    except (OSError, DiffbitError):
        return  # ONNX Runtime cannot start either; why_no_cuda explains it
    built_for = str(getattr(ort, "cuda_version", None) or "")  # of the wheel, such as "13.0"
    major = int(built_for.partition(".")[0]) if built_for[:1].isdigit() else 0
    if driver.cuda_version[0] < major:
        newer = f"install driver {DRIVERS[major]} or newer" if major in DRIVERS else "install a newer driver"
        older = f", or pip install 'onnxruntime-gpu[cuda,cudnn]<{FIRST_FOR_CUDA_13}'" if major == 13 else ""
        raise DiffbitError(
            f"device cuda was requested, but the NVIDIA driver is for CUDA {version_text(driver.cuda_version)}, and "
            f"ONNX Runtime {ort.__version__} is for CUDA {built_for}: {newer}{older}, or run with device cpu"
        )
    compiled = cuda_architectures(library) if library is not None else []
    if compiled and not runs(card, compiled):
        raise DiffbitError(
            f"device cuda was requested, but the GPU is sm_{card}, and {library} has kernels for "
            f"{', '.join(f'sm_{name}' for name in compiled)}: build it with -DDIFFBIT_CUDA_ARCHITECTURES={card} "
            "(docs/gpu.md), run without it (--no-native), or with device cpu"
        )


def _cannot_start(ort: ModuleType, device: Device, why: str) -> str:
    return (
        f"device {device.name} was requested, but ONNX Runtime {ort.__version__} cannot start its {device.provider}: "
        f"{why}; or run with device cpu"
    )


def _why_not(ort: ModuleType, device: Device, error: str) -> str | None:
    """Say why a session's device cannot start; None if the error is about the model."""
    if device.name == "cuda" and "CUDA" in error:
        return why_no_cuda(ort)
    if device.name == "webgpu" and "adapter" in error:
        try:
            ctypes.CDLL("libvulkan.so.1")
        except OSError:
            if sys.platform == "linux":
                return "libvulkan.so.1 is missing: install Vulkan's loader (Debian and Ubuntu: libvulkan1)"
        return "no driver offers a GPU: install the GPU's driver (Debian and Ubuntu: mesa-vulkan-drivers)"
    return None


def why_no_cuda(ort: ModuleType) -> str | None:
    """Say why the CUDAExecutionProvider cannot start: a missing library, or the driver's message. None if the reason is
    another one, and on systems other than Linux.

    ONNX Runtime itself writes the reason only to its log.
    """
    if sys.platform != "linux":
        return None
    folder = Path(ort.__file__ or "").parent / "capi"
    try:  # in ONNX Runtime's order: the second library uses functions of the first
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
        Driver()
    except DiffbitError as error:
        return str(error)
    except OSError as error:
        missing = re.match(r"([^:/]+): cannot open shared object file", str(error))
        if missing is None:
            return str(error)
        if missing[1].startswith("libcuda.so"):
            return f"{missing[1]} is missing, which comes with the NVIDIA driver: install the driver"
        return f"{missing[1]} is missing: pip install 'onnxruntime-gpu[cuda,cudnn]' installs CUDA's libraries"
    return None


def out_of_memory(error: Exception) -> bool:
    """Whether an exception from ONNX Runtime means that the device or the host is out of memory."""
    message = str(error).lower()
    texts = ("out of memory", "failed to allocate memory", "available memory of", "bad_alloc", "bad allocation")
    return isinstance(error, MemoryError) or any(text in message for text in texts)


def lacks_16_bits(error: Exception) -> bool:
    """Whether an exception from ONNX Runtime means that the device has no 16-bit floats (WebGPU's shader-f16)."""
    return "f16" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
