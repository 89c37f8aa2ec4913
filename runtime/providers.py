"""ONNX Runtime, imported only when a session is opened, and the promise that a device asked for is the device used.

The CPU and the GPU wheel of ONNX Runtime overwrite each other's files, so neither is a base dependency. A session
that asks for CUDA and cannot have it falls back to the CPU with a mere warning; here that is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import DiffbitError
from ..ops.schema import OPS
from .driver import Driver, runs, version_text
from .native import cuda_architectures

DEVICES = ("cpu", "cuda")
DRIVERS = {12: 525, 13: 580}  # the oldest driver of each CUDA
FIRST_FOR_CUDA_13 = "1.27"  # of onnxruntime-gpu's wheels on PyPI; those before are for CUDA 12
MOST_THREADS = 512  # ONNX Runtime starts as many as it is told to, and hangs in that

# What a model spends its time in. `session.disable_cpu_ep_fallback` would be the stricter guard, but ONNX Runtime
# itself places arithmetic on shapes (Shape, Gather, Concat, ...) on the CPU, and that option then refuses every graph.
COMPUTE = frozenset(
    {
        *("MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
        *("MatMulNBits", "MatMulBnb4"),
        *("Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"),
        *(op.name for op in OPS if op.compute),
    }
)


def onnxruntime() -> ModuleType:
    """The onnxruntime module, or a DiffbitError that says how to install it."""
    install = "pip install onnxruntime, or 'onnxruntime-gpu[cuda,cudnn]' for an NVIDIA GPU"
    try:
        import onnxruntime as ort
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "onnxruntime":
            raise
        raise DiffbitError(f"running a model needs ONNX Runtime, which is not installed: {install}") from None
    except ImportError as error:
        raise DiffbitError(f"ONNX Runtime is installed but cannot be loaded ({error}): {install}") from None
    if not hasattr(ort, "InferenceSession"):  # what removing one of two overlapping wheels leaves behind
        raise DiffbitError(f"ONNX Runtime is installed but incomplete: pip uninstall onnxruntime, then {install}")
    return ort


def open_session(model: Path, device: str, threads: int | None, library: Path | None = None) -> Any:
    """An `onnxruntime.InferenceSession` of `model` that really runs on `device` ("cpu" or "cuda").

    `threads` is the size of the intra-op pool; None lets ONNX Runtime take one per physical core. `library` holds
    kernels for diffbit's operators (native.py); without one their bodies run.
    """
    if device not in DEVICES:
        raise DiffbitError(f"device {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise DiffbitError(f"threads is {threads}, wanted 1 to {MOST_THREADS}")
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # an error comes as an exception, too; the rest is for ONNX Runtime's developers
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # a plan of memory for each length of a prompt, kept: 12 MB more, nothing faster
    if threads is not None:
        options.intra_op_num_threads = threads
    if library is not None:
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # ONNX Runtime's exceptions have no base of their own
            raise DiffbitError(
                f"{library}: ONNX Runtime {ort.__version__} cannot use diffbit's native library "
                f"({_first_line(error)}); install diffbit again, or run without it (--no-native)"
            ) from None
    providers = ["CPUExecutionProvider"]
    if device == "cuda":
        ort.set_default_logger_severity(4)  # what the provider says outside of a session
        _require_cuda(ort)
        _check_card(ort, library)
        providers.insert(0, "CUDAExecutionProvider")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        # Its own way back to the CPU would be silent but for what it prints
        session = ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions have no base of their own
        if out_of_memory(error):
            raise DiffbitError(f"{model}: does not fit into the memory of device {device}") from None
        if device == "cuda" and "CUDA" in str(error) and (why := why_no_cuda(ort)):
            raise DiffbitError(_no_cuda(ort, why)) from None
        raise DiffbitError(f"{model}: ONNX Runtime {ort.__version__} cannot load it ({_first_line(error)})") from None
    _give_memory_back()
    if device == "cuda":
        active = session.get_providers()
        if "CUDAExecutionProvider" not in active:
            raise DiffbitError(_no_cuda(ort, why_no_cuda(ort) or f"it offers {', '.join(active)}"))
        if stray := compute_on_cpu(session):
            raise DiffbitError(
                f"{model}: device cuda was asked for, but ONNX Runtime {ort.__version__} would run these operators of "
                f"it on the CPU: {', '.join(sorted(stray))}; run with device cpu, or export with other formats"
            )
    return session


def _give_memory_back() -> None:
    """To the system what loading took for a while: glibc keeps it otherwise, several bytes for each ternary weight."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def compute_on_cpu(session: Any) -> set[str]:
    """The operator types of COMPUTE that a session placed on the CPU; empty where ONNX Runtime (< 1.24) cannot say.

    The session must have been made with `session.record_ep_graph_assignment_info` = 1.
    """
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:
        return set()
    return {
        node.op_type
        for part in assignment()
        if part.ep_name == "CPUExecutionProvider"
        for node in part.get_nodes()
        if node.op_type in COMPUTE
    }


def _require_cuda(ort: ModuleType) -> None:
    available = ort.get_available_providers()
    if "CUDAExecutionProvider" not in available:
        raise DiffbitError(
            "device cuda needs ONNX Runtime's CUDAExecutionProvider; the installed wheel has "
            f"{', '.join(available)}: pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
    # Finds the CUDA libraries that came as wheels. It prints what it misses; a library must not.
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def _check_card(ort: ModuleType, library: Path | None) -> None:
    """Refuses a driver that is older than ONNX Runtime's CUDA, and a card that the library has no kernels for."""
    try:
        driver = Driver()
        card = driver.architecture
    except (OSError, DiffbitError):
        return  # ONNX Runtime cannot start either, and why_no_cuda says why
    wanted = str(getattr(ort, "cuda_version", None) or "")  # of the wheel, such as "13.0"
    major = int(wanted.partition(".")[0]) if wanted[:1].isdigit() else 0
    if driver.cuda_version[0] < major:
        newer = f"install driver {DRIVERS[major]} or newer" if major in DRIVERS else "install a newer driver"
        older = f", or pip install 'onnxruntime-gpu[cuda,cudnn]<{FIRST_FOR_CUDA_13}'" if major == 13 else ""
        raise DiffbitError(
            f"device cuda was asked for, but the NVIDIA driver is for CUDA {version_text(driver.cuda_version)}, and "
            f"ONNX Runtime {ort.__version__} is for CUDA {wanted}: {newer}{older}, or run with device cpu"
        )
    compiled = cuda_architectures(library) if library is not None else []
    if compiled and not runs(card, compiled):
        raise DiffbitError(
            f"device cuda was asked for, but the card is an sm_{card}, and {library} has kernels for "
            f"{', '.join(f'sm_{name}' for name in compiled)}: build it with -DDIFFBIT_CUDA_ARCHITECTURES={card} "
            "(docs/gpu.md), run without it (--no-native), or with device cpu"
        )


def _no_cuda(ort: ModuleType, why: str) -> str:
    return (
        f"device cuda was asked for, but ONNX Runtime {ort.__version__} cannot start its CUDAExecutionProvider: {why}; "
        "or run with device cpu"
    )


def why_no_cuda(ort: ModuleType) -> str | None:
    """What keeps the CUDAExecutionProvider from starting: a library that is not there, or what the driver says.

    ONNX Runtime itself writes it to its log only. None where nothing is found, or where it is not Linux.
    """
    if sys.platform != "linux":
        return None
    folder = Path(ort.__file__ or "").parent / "capi"
    try:  # as it does: the second takes its functions from the first
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
        Driver()
    except OSError as error:
        return _missing_library(str(error))
    except DiffbitError as error:
        return str(error)
    return None


def _missing_library(said: str) -> str:
    """What the dynamic linker said, with what to do about it."""
    found = re.match(r"(?P<name>[^:/]+): cannot open shared object file", said)
    if found is None:
        return said
    name = found["name"]
    if name.startswith("libcuda.so"):
        return f"{name} is missing, which comes with the NVIDIA driver: install the driver"
    return f"{name} is missing: pip install 'onnxruntime-gpu[cuda,cudnn]' installs CUDA's libraries"


def out_of_memory(error: Exception) -> bool:
    """Whether an exception of ONNX Runtime says that there is no memory left, on the device or beside it."""
    said = str(error).lower()
    texts = ("out of memory", "failed to allocate memory", "available memory of", "bad_alloc", "bad allocation")
    return isinstance(error, MemoryError) or any(text in said for text in texts)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
