"""A stand-in for the NVIDIA driver: a libcuda.so.1 that says what a test wants."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
extern "C" {{
int cuInit(unsigned) {{ return {status}; }}
int cuGetErrorString(int, const char** out) {{ *out = "no CUDA-capable device is detected"; return 0; }}
int cuDriverGetVersion(int* out) {{ *out = {version}; return 0; }}
int cuDeviceGet(int* out, int) {{ *out = 0; return 0; }}
int cuDeviceGetAttribute(int* out, int which, int) {{ *out = which == 75 ? {card} / 10 : {card} % 10; return 0; }}
int cuDevicePrimaryCtxRetain(void** out, int) {{ *out = out; return 0; }}
int cuCtxSetCurrent(void*) {{ return 0; }}
int cuMemGetInfo_v2(unsigned long* free, unsigned long* total) {{
  static unsigned long calls = 0;  // each finds 1000 bytes more in use
  *total = 80000, *free = 79000 - 1000 * calls++;
  return 0;
}}
}}
"""


def compiled(source: str, library: Path, *options: str) -> None:
    library.parent.mkdir(exist_ok=True)
    command = ["c++", "-x", "c++", "-", "-shared", "-fPIC", "-o", str(library), "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True)


def install_driver(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, version: int = 13000, card: int = 90, status: int | None = 0
) -> None:
    """`version`: the newest CUDA that it runs; `card`: 90 of sm_90; `status`: what cuInit gives, None: no driver."""
    if sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("needs Linux and a C++ compiler")
    library = folder / "driver" / "libdriver.so"
    compiled(SOURCE.format(version=version, card=card, status=status or 0), library)
    open_library = ctypes.CDLL

    def fake(name: str, *mode: int) -> ctypes.CDLL:
        if name != "libcuda.so.1":
            return open_library(name, *mode)
        if status is None:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return open_library(str(library))

    monkeypatch.setattr(ctypes, "CDLL", fake)
