"""The NVIDIA driver, asked through ctypes: which CUDA it is for, what its first card is, how much of it is in use.

driver = Driver()                       OSError where libcuda.so.1 cannot be loaded
driver.cuda_version, driver.architecture            (13, 0), 90 of sm_90
"""

from __future__ import annotations

import ctypes

from ..errors import DiffbitError

_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: the compute capability


class Driver:
    """libcuda.so.1, initialized. What it refuses is a DiffbitError with its own words."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        self.cuda_version = version.value // 1000, version.value % 1000 // 10  # the newest CUDA that it runs
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status == 0:
            return
        said = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(said))
        text = (said.value or b"").decode() or f"error {status}"
        raise DiffbitError(f"the NVIDIA driver, which is for CUDA {version_text(self.cuda_version)}, says: {text}")

    @property
    def architecture(self) -> int:
        """90 of a card that runs sm_90."""
        number = ctypes.c_int()
        parts = []
        for attribute in (_MAJOR, _MINOR):
            self._call("cuDeviceGetAttribute", ctypes.byref(number), attribute, self._device)
            parts.append(number.value)
        return 10 * parts[0] + parts[1]

    def used_memory(self) -> int:
        """Bytes of the card that are taken, by whichever process. Makes this process's CUDA context first."""
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)  # ONNX Runtime's own, too
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value


def version_text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def runs(architecture: int, compiled: list[str]) -> bool:
    """Whether a card of sm_`architecture` runs code compiled for these, as "80" or "90a", the first as PTX, too.

    Code with a letter runs on its own card only; without, on later minor versions of its major one. PTX is compiled for
    every newer card, where it has no letter.
    """
    exact = {int(name.rstrip("abcdef")) for name in compiled}
    plain = [int(name) for name in compiled if name.isdigit()]
    same_major = any(number // 10 == architecture // 10 and number <= architecture for number in plain)
    newer = compiled[0].isdigit() and int(compiled[0]) <= architecture
    return architecture in exact or same_major or newer
