"""The NVIDIA driver through ctypes: its CUDA version, and the architecture and memory of the first GPU.

driver = Driver()                                   # OSError where libcuda.so.1 cannot be loaded
driver.cuda_version, driver.architecture            # (13, 0), 90 for sm_90
"""

from __future__ import annotations

import ctypes

from ..io.errors import DiffbitError

_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: the compute capability


class Driver:
    """libcuda.so.1, initialized. A call that fails raises DiffbitError with the driver's own message."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        self.cuda_version = version.value // 1000, version.value % 1000 // 10  # the newest that it runs
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status == 0:
            return
        message = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(message))
        text = (message.value or b"").decode() or f"error {status}"
        raise DiffbitError(f"the NVIDIA driver, which is for CUDA {version_text(self.cuda_version)}, says: {text}")

    @property
    def architecture(self) -> int:
        """Compute capability of the GPU: 90 for sm_90."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, self._device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, self._device)
        return 10 * major.value + minor.value

    def used_memory(self) -> int:
        """Return the bytes of GPU memory that all processes use. Creates this process's CUDA context first."""
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)  # ONNX Runtime uses the same
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value


def version_text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def runs(architecture: int, compiled: list[str]) -> bool:
    """Whether a GPU of sm_`architecture` runs code compiled for these architectures ("80", "90a").

    Code for an architecture with a letter runs on that one only; without a letter it also runs on later minor versions
    of the same major version. The first architecture is also included as PTX, which every newer GPU runs if the
    architecture has no letter.
    """
    exact = {int(name.rstrip("abcdef")) for name in compiled}
    plain = [int(name) for name in compiled if name.isdigit()]
    same_major = any(number // 10 == architecture // 10 and number <= architecture for number in plain)
    newer = compiled[0].isdigit() and int(compiled[0]) <= architecture
    return architecture in exact or same_major or newer
